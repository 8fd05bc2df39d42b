"""The Draw tab: the form, progress with a live preview, Cancel, and the pictures of the run."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.runs.notices import find_notices
from fastdiff.ui.drawn import Drawn, draw
from fastdiff.ui.limits import Limits
from fastdiff.ui.messages import PROBLEMS, field_name, note, problem
from fastdiff.ui.models import Models
from fastdiff.ui.options import Options, prepare
from fastdiff.ui.session import Session
from fastdiff.ui.tabs.controls import Subject, Updates
from fastdiff.ui.tabs.examples import build_examples, examples_of, fit_examples
from fastdiff.ui.tabs.form import Form
from fastdiff.ui.tabs.gallery import GRID, Panel, Stage
from fastdiff.ui.tabs.progress import PREVIEW_INTERVAL, bar, preview
from fastdiff.ui.tabs.running import QUICK, Buttons
from fastdiff.ui.tabs.upload import build_upload, read_foreign, read_record, uploaded_path

# settings of a picture that the form cannot show: it has no field for them, and takes an empty negative prompt for none
UNSHOWN = ("revision", "variant", "use_clipped_model_output", "negative_prompt")


@dataclass(frozen=True)
class DrawTab:
    form: Form
    buttons: Buttons
    examples: gr.Dataset
    upload: gr.File
    session: gr.State
    status: gr.HTML
    preview: gr.HTML
    stage: Stage
    panel: Panel

    @classmethod
    def build(cls, models: Models, card: ModelCard, limits: Limits, session: gr.State) -> "DrawTab":
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                form = Form.build(models, card, limits)
                buttons = Buttons.build("Generate")
            with gr.Column(scale=3, min_width=300, elem_classes="stage-side"):
                status = gr.HTML(note("Choose what to draw and press Generate."), elem_id="status", min_height=56)
                with gr.Column(elem_classes="stage-column"):
                    live = gr.HTML(elem_id="preview")
                    stage = Stage.build("Pictures", "gallery")
                panel = Panel.build()
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                examples = build_examples(card)
            with gr.Column(scale=2, min_width=300):
                upload = build_upload()
        tab = cls(form, buttons, examples, upload, session, status, live, stage, panel)
        tab._connect()
        return tab

    def _connect(self) -> None:
        outputs = [self.preview, self.stage.gallery, *self.panel.components, *self.form.seed.components]
        inputs = {*self.form.components, self.session, self.stage.view}
        self.buttons.connect(self.form.typed, self.run, inputs, self.status, outputs, live=[self.preview])
        # a hub model may take a while to come
        visibly = QUICK | {"show_progress": "full", "show_progress_on": self.status}
        self.form.model.input(self.follow_model, {*self.form.components}, self.shown, **visibly)
        self.form.subject.follow(self.form.models, self.form.model)
        self.form.boxes.follow(self.form.models, [self.form.model])
        self.examples.click(self.try_example, [self.examples, self.form.model], self.shown, **QUICK)
        # without Gradio's preprocessing, which leaves an open file behind
        restored = [*self.shown, self.upload]
        self.upload.upload(self.restore, {self.upload, *self.form.components}, restored, preprocess=False, **QUICK)
        self.panel.follow(self.stage, self.session, lambda session: session.run)
        self.panel.use.click(self.use, self.panel.chosen, self.shown, **QUICK)

    @property
    def shown(self) -> list[Component]:
        """The components that another model or other settings change."""
        return [*self.form.components, self.examples, self.status]

    def run(self, data: Mapping[Component, Any], request: gr.Request) -> Iterator[Updates]:
        """Draw what the form asks for. Yields after each step, where Gradio can end the run."""
        session: Session = data[self.session]
        try:
            seed = self.form.seed.chosen(data)
            run = prepare(self.form.options({**data, self.form.seed.seed: seed}), self.form.models, self.form.limits)
            notices = find_notices(run) if run.request.prompt else []
            started: Updates = {self.form.seed.seed: seed, self.form.seed.spent: seed}
            yield {self.status: note("Starting"), self.preview: "", **started}
            pictures: list[Drawn] = []
            previewed = 0.0
            for progress, drawn in draw(run, self.form.models, session.shelf(request).new_folder()):
                updates: Updates = {self.status: bar(progress)}
                if drawn:  # those before stay until the first is there to take their place
                    is_first = not pictures and data[self.stage.view] != GRID
                    session.run = pictures = pictures + drawn
                    updates |= self.stage.show(pictures, 0 if is_first else None)
                    updates |= self.panel.show(drawn[0]) if is_first else {}
                if time.monotonic() - previewed > PREVIEW_INTERVAL:
                    previewed = time.monotonic()
                    updates[self.preview] = preview(progress)
                yield updates
        except PROBLEMS as error:
            yield {self.status: problem(error), self.preview: "", **self.buttons.free}
        else:
            count = "1 picture" if len(run.cells) == 1 else f"{len(run.cells)} pictures"
            done = [f"Drew {count} in {progress.seconds:.1f} s", *notices]
            yield {self.status: note("; ".join(done)), self.preview: "", **self.buttons.free}

    def follow_model(self, data: Mapping[Component, Any]) -> Updates:
        """The controls and defaults of a model that was chosen."""
        name = data[self.form.model]
        try:
            updates = self.form.fit(data)
            ready = {
                self.examples: fit_examples(self.form.models.card(name)),
                self.status: note(f"Ready to draw with {name}"),
            }
        except PROBLEMS as error:
            return {self.status: problem(error)}
        return updates | ready if updates else {self.status: gr.skip()}

    def try_example(self, index: int, name: str) -> Updates:
        """The form with an example of its model."""
        card = self.form.models.card(name)
        return self.form.show_example(card, examples_of(card)[index])

    def use(self, chosen: Drawn | None) -> Updates:
        """The form with the settings of a picture of this visit."""
        if chosen is None:
            return {self.status: problem(InputError("no picture is chosen; click one first"))}
        return self._fill(chosen.record, f"seed {chosen.record['seed']}")

    def restore(self, data: Mapping[Component, Any]) -> Updates:
        """The form with the settings inside an uploaded PNG, which is not kept."""
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
            return self._fill_foreign(*foreign, path.name, data) | {self.upload: None}
        count = record.pop("grid_of", 1)
        name = path.name if count == 1 else f"the first of {count} pictures in {path.name}"
        return self._fill(record, name) | {self.upload: None}

    def _fill_foreign(
        self, values: Mapping[str, Any], rest: Sequence[str], name: str, data: Mapping[Component, Any]
    ) -> Updates:
        """The form with each value of another tool that its model can be drawn with; a line names the others."""
        form = self.form
        try:
            options = form.options(data)
            card = form.models.card(options.model)
            options, taken = _fit(options, card, values, lambda tried: prepare(tried, form.models, form.limits))
            label = options.label if card.labels and Subject.offers(card, options.label) else None
            updates = form.show(card, vars(options) | {"num_inference_steps": options.steps, "label": label})
        except PROBLEMS as error:
            return {self.status: problem(error)}
        left = [*(field_name(key) for key in values if key not in taken), *rest]
        said = f"From {name}, which another tool made: {', '.join(map(field_name, taken)) or 'nothing'}"
        said += f"; not used with {card.name}: {', '.join(left)}" if left else ""
        return updates | {self.status: note(said)}

    def _fill(self, record: Mapping[str, Any], name: str) -> Updates:
        try:
            run = prepare(Options.from_record(record), self.form.models, self.form.limits)
            if not run.card.reads_text and not Subject.offers(run.card, record["label"]):
                raise InputError(f"label {record['label']}: the form does not offer it; choose another")
            here = run.request.as_record()
            others = [key for key in UNSHOWN if record.get(key) not in (None, here.get(key))]
            updates = self.form.show(run.card, record)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        done = f"Settings of {name} are in the form"
        done += f", but this page draws with another {' and '.join(others)}" if others else ""
        return updates | {self.examples: fit_examples(run.card), self.status: note(done)}


def _fit(
    options: Options, card: ModelCard, values: Mapping[str, Any], check: Callable[[Options], object]
) -> tuple[Options, list[str]]:
    """The options with those of the values that pass `check`, and the names of these. A prompt can be a label."""
    taken = []
    for name, value in values.items():
        is_label = name == "prompt" and not card.reads_text
        tried = replace(options, **({"label": value} if is_label else {name: value}))
        tried = replace(tried, eta=None) if name == "scheduler" else tried
        try:
            check(tried)
        except InputError:
            continue
        options = tried
        taken.append(name)
    return options, taken
