"""The Draw tab: the form, progress with a live preview, Cancel, and the pictures of the run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.requests.foreign import Foreign
from fastdiff.requests.request import AXES
from fastdiff.runs.drawing import Progress, Run
from fastdiff.runs.notices import find_notices
from fastdiff.ui.drawing import Drawn, Session, draw, prepare
from fastdiff.ui.engine import Engine
from fastdiff.ui.gallery import GRID, Panel, SaveGrid, Stage, required
from fastdiff.ui.parts.examples import build_examples, example_of, fit_examples
from fastdiff.ui.parts.form import DrawForm
from fastdiff.ui.parts.messages import PROBLEMS, field_name, note, number_of_pictures, problem
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.parts.running import QUICK, Buttons, Updates, starting
from fastdiff.ui.parts.subject import LabelPickers
from fastdiff.ui.parts.upload import build_upload, form_settings, read_foreign, read_record, uploaded_path
from fastdiff.ui.progress import bar, with_previews
from fastdiff.ui.sheet import draw_sheet, prepare_sheet

# settings that the form cannot show: it has no field for the first three, and an empty negative prompt means none
UNSHOWN = ("revision", "variant", "use_clipped_model_output", "negative_prompt")


@dataclass(frozen=True)
class DrawTab:
    engine: Engine
    form: DrawForm
    buttons: Buttons
    examples: gr.HTML
    upload: gr.File
    session: gr.State
    status: gr.HTML
    preview: gr.HTML
    stage: Stage
    save: SaveGrid
    panel: Panel

    @classmethod
    def build(cls, engine: Engine, card: ModelCard, limits: Limits, session: gr.State) -> "DrawTab":
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                form = DrawForm.build(engine.catalogue, card, limits)
                buttons = Buttons.build("Generate")
            with gr.Column(scale=3, min_width=300, elem_classes="stage-side"):
                status = gr.HTML(
                    note("Choose what to draw and press Generate."),
                    elem_id="status",
                    elem_classes="status",
                    min_height=56,
                )
                with gr.Column(elem_classes="stage-column"):
                    live = gr.HTML(elem_id="preview")
                    stage = Stage.build("Pictures", "gallery")
                    with stage.bar:
                        save = SaveGrid.build()
                panel = Panel.build()
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                examples = build_examples(card)
            with gr.Column(scale=1, min_width=260):
                upload = build_upload()
        tab = cls(engine, form, buttons, examples, upload, session, status, live, stage, save, panel)
        tab._connect()
        return tab

    def _connect(self) -> None:
        outputs = [self.preview, self.stage.gallery, *self.panel.components, *self.form.seeds.components]
        outputs.append(self.save.button)
        inputs = {*self.form.components, self.session, self.stage.view}
        running = self.buttons.connect(self.form.typed, self.run, inputs, self.status, outputs, live=[self.preview])
        running.success(self.show_again, [self.session, self.stage.view], self.stage.gallery, **QUICK)
        # a hub model may take a while to download
        visibly = QUICK | {"show_progress": "full", "show_progress_on": self.status}
        self.form.model.input(self.follow_model, {*self.form.components}, self.shown, **visibly)
        self.form.follow()
        self.form.axes.follow({*self.form.components}, self.form.request)
        self.save.connect(self.session, self.status)
        self.examples.click(self.try_example, self.form.model, self.shown, **QUICK).success(
            None, js=self.buttons.press, **QUICK
        )
        # Gradio's preprocessing would leave a file open
        restored = [*self.shown, self.upload]
        self.upload.upload(self.restore, {self.upload, *self.form.components}, restored, preprocess=False, **QUICK)
        self.panel.follow(self.stage, self.session, lambda session: session.drawn)
        self.panel.use.click(self.use, self.panel.chosen, self.shown, **QUICK)

    @property
    def shown(self) -> list[Block]:
        """The components that change with the model or the settings."""
        return [*self.form.components, self.form.axes.box, self.examples, self.status]

    def run(self, data: Mapping[Component, Any], request: gr.Request) -> Iterator[Updates]:
        """Draw the form's request. Yields after each step, where Gradio can cancel the run."""
        session: Session = data[self.session]
        seed = self.form.seeds.chosen(data)
        folder = session.shelf(request).new_folder()
        runs, of_sheet, steps = self._start({**data, self.form.seed: seed}, folder)
        notices = dict.fromkeys(line for run in runs if run.request.prompt for line in find_notices(run))
        started: Updates = {self.form.seed: seed, self.form.seeds.spent: seed}
        yield {self.status: starting(self.engine.turns), self.preview: "", **started}
        pictures: list[Drawn] = []
        shown: Updates = {}
        for progress, drawn, live in with_previews(steps):
            updates: Updates = {self.status: bar(progress)}
            if drawn:  # earlier pictures stay until the first new one replaces them
                is_sheet = AXES in drawn[0].record
                is_first = (is_sheet or not pictures) and data[self.stage.view] != GRID
                pictures = drawn + pictures if is_sheet else pictures + drawn
                session.drawn, session.run = pictures, None if of_sheet else runs[0]
                shown = self.stage.show(pictures, 0 if is_first else None) | self.save.show(session)
                shown |= self.panel.show(drawn[0]) if is_first else {}
                updates |= shown
            yield updates if live is None else updates | {self.preview: live}
        drew = number_of_pictures(len(pictures) - of_sheet)
        drew += " and their sheet" if of_sheet else ""
        done = [f"Drew {drew} in {progress.seconds:.1f} s", *notices]
        # show the pictures again: the browser drops all but the last of simultaneous updates
        yield {**shown, self.status: note("; ".join(done)), self.preview: "", **self.buttons.free}

    def show_again(self, session: Session, view: str) -> Updates:
        """Show the pictures of a finished run again, because the browser may drop simultaneous gallery updates."""
        is_sheet = bool(session.drawn) and AXES in session.drawn[0].record
        return self.stage.show(session.drawn, 0 if is_sheet and view != GRID else None)

    def _start(
        self, data: Mapping[Component, Any], folder: Path
    ) -> tuple[list[Run], bool, Iterator[tuple[Progress, list[Drawn]]]]:
        """Return the requested runs, whether they form a sheet, and their steps. Raises InputError like `prepare`."""
        asked = self.form.request(data)
        axes = self.form.axes.chosen(data)
        if axes:
            sheet = prepare_sheet(asked, axes, self.engine, self.form.limits)
            return sheet.runs, True, draw_sheet(sheet, self.engine, folder)
        run = self.prepare(asked)
        return [run], False, draw(run, self.engine, folder)

    def prepare(self, asked: UncheckedRequest) -> Run:
        """Return the requested run. Raises InputError like `drawing.prepare`."""
        return prepare(asked, self.engine, self.form.limits)

    def follow_model(self, data: Mapping[Component, Any]) -> Updates:
        """Fit the controls and their defaults to the chosen model."""
        name = data[self.form.model]
        try:
            updates = self.form.fit(data)
            ready = {
                self.examples: fit_examples(self.engine.catalogue.card(name)),
                self.status: note(f"Ready to draw with {name}"),
            }
        except PROBLEMS as error:
            return {self.status: problem(error)}
        return updates | ready if updates else {self.status: gr.skip()}

    def try_example(self, name: str, event: gr.EventData) -> Updates:
        """Fill the form with the settings of the clicked example. The page then starts the run."""
        example = example_of(self.engine.catalogue.card(name), event)
        return self._fill(example.record, f"the example {example.subject}")

    def use(self, chosen: Drawn | None) -> Updates:
        """Fill the form with the settings of a picture of this session."""
        try:
            chosen = required(chosen)
            record = form_settings(chosen.record, chosen.path.name, self.form.limits)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        is_single = AXES not in record and not isinstance(chosen.record["seed"], list)
        return self._fill(record, f"seed {record['seed']}" if is_single else chosen.path.name)

    def restore(self, data: Mapping[Component, Any]) -> Updates:
        """Fill the form with the settings inside an uploaded picture, and delete the upload."""
        try:
            path = uploaded_path(data[self.upload])
            try:
                foreign = read_foreign(path, self.form.limits)
                record = {} if foreign else read_record(path, self.form.limits)
            finally:
                path.unlink(missing_ok=True)
        except PROBLEMS as error:
            return {self.status: problem(error), self.upload: None}
        if foreign:
            return self._fill_foreign(foreign, path.name, data) | {self.upload: None}
        return self._fill(record, path.name) | {self.upload: None}

    def _fill_foreign(self, foreign: Foreign, name: str, data: Mapping[Component, Any]) -> Updates:
        """Fill the form with each value of another tool that the model accepts. The status line names the others.

        A prompt that the chosen model cannot read chooses a model that reads text.
        """
        try:
            asked = self.form.request(data)
            before = self.engine.catalogue.card(asked.model)
            asked, card = self._with_reader(asked, before, foreign)
            asked, taken = _fit(asked, card, foreign.values, self.prepare)
            updates = self.form.show_request(card, asked)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        left = [*(field_name(key) for key in foreign.values if key not in taken), *foreign.lacking]
        said = f"Loaded from {name} (made by {foreign.tool}): {', '.join(map(field_name, taken)) or 'nothing'}"
        said += f"; chose {card.name}, because {before.name} reads no prompts" if card.name != before.name else ""
        said += f"; not supported by {card.name}: {', '.join(left)}" if left else ""
        return updates | {self.examples: fit_examples(card), self.status: note(said)}

    def _with_reader(
        self, asked: UncheckedRequest, card: ModelCard, foreign: Foreign
    ) -> tuple[UncheckedRequest, ModelCard]:
        """Return the request, for a model that reads text if `foreign` has a prompt that `card` has not as a label.

        Of several such models, the one with the nearest size is chosen.
        """
        prompt, sides = foreign.values["prompt"], (foreign.values.get("width", 0), foreign.values.get("height", 0))
        readers = [each for each in self.engine.catalogue.cards() if each.reads_text]
        if card.reads_text or not prompt or LabelPickers.offers(card, prompt) or not readers:
            return asked, card
        area = sides[0] * sides[1]
        reader = min(readers, key=lambda each: abs(area - (each.size[0] * each.size[1] if each.size else 0)))
        counts = {"num_images": asked.num_images, "batch_size": asked.batch_size, "seed": asked.seed}
        return UncheckedRequest(model=reader.name, prompt="", **counts), reader

    def _fill(self, record: Mapping[str, Any], name: str) -> Updates:
        try:
            asked = UncheckedRequest.from_record(record)
            run = self.prepare(asked)
            if AXES in record:
                prepare_sheet(asked, record[AXES], self.engine, self.form.limits)
            if not run.card.reads_text and not LabelPickers.offers(run.card, record["label"]):
                raise InputError(f"label {record['label']} is not available in this form; choose another")
            here = run.request.as_record()
            others = [key for key in UNSHOWN if record.get(key) not in (None, here.get(key))]
            updates = self.form.show(run.card, record)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        first = f"the first of {record['grid_of']} pictures in " if "grid_of" in record else ""
        done = f"Loaded the settings of {first}{name}{', and its axes' if AXES in record else ''}"
        done += f"; not restored: {' and '.join(others)}" if others else ""
        return updates | {self.examples: fit_examples(run.card), self.status: note(done)}


def _fit(
    asked: UncheckedRequest, card: ModelCard, values: Mapping[str, Any], check: Callable[[UncheckedRequest], object]
) -> tuple[UncheckedRequest, list[str]]:
    """Return the request with each value that passes `check`, and the names of these values.

    For a model that reads no text, the prompt is tried as a label.
    """
    taken = []
    for name, value in values.items():
        is_label = name == "prompt" and not card.reads_text
        tried = replace(asked, **({"label": value} if is_label else {name: value}))
        tried = replace(tried, eta=None) if name == "scheduler" else tried
        try:
            check(tried)
        except InputError:
            continue
        asked = tried
        taken.append(name)
    return asked, taken
