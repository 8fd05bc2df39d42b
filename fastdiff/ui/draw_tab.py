"""The Draw tab: the form, progress with a live preview, Cancel, and the pictures of the run."""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.requests.foreign import MODEL, Foreign
from fastdiff.requests.request import AXES, FILE_SETTINGS
from fastdiff.runs.drawing import Progress, Run
from fastdiff.runs.model_files import find_of_tool
from fastdiff.runs.notices import find_notices
from fastdiff.ui.drawing import Drawn, Session, draw, files_of, prepare, with_files_here
from fastdiff.ui.gallery import GRID, Panel, SaveRun, Stage, captioned, required
from fastdiff.ui.inputs.axes import Axes
from fastdiff.ui.inputs.uploaded import uploaded_path
from fastdiff.ui.parts.examples import build_examples, example_of, fit_examples
from fastdiff.ui.parts.form import DrawForm
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.parts.subject import LabelPickers
from fastdiff.ui.parts.upload import (
    build_upload,
    form_settings,
    read_foreign,
    read_record,
)
from fastdiff.ui.progress import View
from fastdiff.ui.queueing.messages import PROBLEMS, field_name, note, number_of_pictures, problem
from fastdiff.ui.queueing.queue import Job, State
from fastdiff.ui.queueing.running import QUICK, SOON, RunControls, Updates, status_of, title_of, words_of_place
from fastdiff.ui.serving.store import Shelf
from fastdiff.ui.shared import Shared, models_of
from fastdiff.ui.sheet import draw_sheet, prepare_sheet
from fastdiff.ui.starting import Starting, larger, with_inputs

KIND = "Draw"  # of jobs
# settings that the form cannot show: it has no field for most, and an empty negative prompt means none
UNSHOWN = (*("revision", "variant", *FILE_SETTINGS, "use_clipped_model_output", "negative_prompt", "mask_crop"),)


@dataclass(frozen=True)
class DrawTab:
    shared: Shared
    form: DrawForm
    controls: RunControls
    examples: gr.HTML
    upload: gr.File
    session: gr.State
    timer: gr.Timer
    status: gr.HTML
    preview: gr.HTML
    stage: Stage
    save: SaveRun
    panel: Panel

    @classmethod
    def build(cls, shared: Shared, card: ModelCard, limits: Limits, session: gr.State, timer: gr.Timer) -> "DrawTab":
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                form = DrawForm.build(shared.catalogue, card, limits)
                controls = RunControls.build("Generate")
            with gr.Column(scale=3, min_width=300, elem_classes="stage-side"):
                status = gr.HTML(
                    note("Choose what to draw and press Generate."),
                    elem_id="status",
                    elem_classes="status",
                )
                with gr.Column(elem_classes="stage-column"):
                    live = gr.HTML(elem_id="preview")
                    examples = build_examples(card)
                    stage = Stage.build("Pictures", "gallery")
                    with stage.bar:
                        save = SaveRun.build()
                panel = Panel.build()
        upload = build_upload()
        tab = cls(shared, form, controls, examples, upload, session, timer, status, live, stage, save, panel)
        tab._connect()
        return tab

    def _connect(self) -> None:
        inputs = {*self.form.components, self.session}
        self.controls.connect(self.form.typed, self.add, inputs, self.timer)
        self.form.seeds.connect([self.session, self.panel.chosen], _seed_shown)
        # a hub model may take a while to download
        visibly = QUICK | {"show_progress": "full", "show_progress_on": self.status}
        # a quick second pick still sends choices of the model before
        fields: set[Block] = {*self.form.components}
        self.form.model.input(self.follow_model, fields, self.shown, preprocess=False, **visibly)
        self.form.follow()
        self.form.boxes.offer_recent(self.session)
        self.form.axes.follow({*self.form.components}, self.form.request)
        self.save.connect(self.session, self.status, self.form.limits.kept)
        self.examples.click(self.try_example, self.form.model, self.shown, **QUICK).success(
            None, js=self.controls.press, **QUICK
        )
        # Gradio's preprocessing would leave a file open
        restored = [*self.shown, self.upload]
        self.upload.upload(self.restore, {self.upload, *self.form.components}, restored, preprocess=False, **QUICK)
        self.panel.follow(self.stage, self.session, lambda session: session.drawn)
        self.panel.use.click(self.use, self.panel.chosen, self.shown, **QUICK)
        self.starting.connect()

    @property
    def starting(self) -> Starting:
        """The events of the start picture."""
        return Starting(self.shared.catalogue, self.form, self.examples, self.status)

    @property
    def shown(self) -> list[Block]:
        """The components that change with the model or the settings."""
        start, boxes = self.form.start, [section.box for section in self.form.sections]
        return [*self.form.components, self.form.axes.box, start.box, *boxes, start.editor, self.examples, self.status]

    def add(self, data: Mapping[Component, Any], request: gr.Request) -> Updates:
        """Add the form's request to the queue. Raises InputError like `prepare`, and if too many runs wait."""
        self._add(self.form.request(data), self.form.axes.chosen(data), data[self.session], request)
        return {}

    def upscale(self, session: Session, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Add a picture of the user to the queue again, larger."""
        try:
            self._add(larger(required(chosen), self.shared.catalogue, self.form.limits), Axes(), session, request)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        return {self.timer: gr.Timer(SOON)}

    def _add(self, asked: UncheckedRequest, axes: Axes, session: Session, request: gr.Request) -> None:
        """Add a request to the queue. Raises as `add`."""
        shelf, limits = session.shelf(request), self.form.limits
        shelf.new_folder()  # raises if the quota is used up
        title, view, steps, models = self._start(asked, axes, shelf)
        job = Job(session.owner(request), KIND, title, view.follow(steps), [view], models)
        self.shared.queue.add(job, limits.waiting, limits.waiting_of_one)

    def _start(
        self, asked: UncheckedRequest, axes: Axes, shelf: Shelf
    ) -> tuple[str, View, Generator[tuple[Progress, list[Drawn]], None, None], frozenset[Hashable]]:
        """Return the title, the view, the steps and the models of the run. Raises InputError like `prepare`."""
        sheet = prepare_sheet(asked, axes, self.shared, self.form.limits) if axes else None
        runs = sheet.runs if sheet else [self.prepare(asked)]
        notices = dict.fromkeys(line for run in runs if run.request.prompt for line in find_notices(run))

        def steps() -> Generator[tuple[Progress, list[Drawn]], None, None]:
            folder = shelf.new_folder()
            yield from draw_sheet(sheet, self.shared, folder) if sheet else draw(runs[0], self.shared, folder)

        title = title_of("X/Y sheet" if sheet else asked.subject, sum(len(run.cells) for run in runs))
        named = replace(runs[0], request=self.shared.catalogue.with_names(runs[0].request))
        return title, View(run=None if sheet else named, notices=notices), steps(), models_of(runs)

    def follow(self, session: Session, request: gr.Request, view: str) -> Updates:
        """Return the updates that show the newest run of the user, also if another tab has started it."""
        queue, owner = self.shared.queue, session.owner(request)
        waiting = [job for job in queue.active(owner) if job.kind == KIND]
        started = queue.started(owner, KIND)
        if waiting and waiting[0].state is State.WAITING:
            return {self.status: note(words_of_place(queue.before(waiting[0]))), **self._show(started, session, view)}
        if not started:
            return {}
        is_running = started[0].state is State.RUNNING
        live = {self.status: status_of(started[0], _told), self.preview: started[0].views[0].live if is_running else ""}
        return live | self._show(started, session, view)

    def _show(self, started: Sequence[Job], session: Session, view: str) -> Updates:
        """Return the updates that show the pictures of the newest run that has any, if they have changed."""
        job = next((job for job in started if job.views[0].drawn), None)
        if job is None or session.shown == (job.id, len(job.views[0].drawn)):
            return {}
        is_new = session.shown is None or session.shown[0] != job.id
        session.shown = job.id, len(job.views[0].drawn)
        pictures = [drawn for drawn in job.views[0].drawn if drawn.path.exists()]
        if not pictures:
            return {}
        session.drawn, session.run = pictures, job.views[0].run
        is_first = (is_new or AXES in pictures[0].record) and view != GRID
        updates = self.stage.show(captioned(pictures), 0 if is_first else None) | self.save.show(session)
        return updates | (self.panel.show(pictures[0]) if is_first else {})

    @property
    def followed(self) -> list[Block]:
        """The components that `follow` updates."""
        return [self.status, self.preview, self.stage.gallery, *self.save.components, *self.panel.components]

    def prepare(self, asked: UncheckedRequest) -> Run:
        """Return the requested run. Raises InputError like `drawing.prepare`."""
        return prepare(asked, self.shared, self.form.limits)

    def follow_model(self, data: Mapping[Component, Any]) -> Updates:
        """Fit the controls and their defaults to the chosen model."""
        name = data[self.form.model]
        try:
            updates = self.form.fit(data)
            ready = {
                self.examples: fit_examples(self.shared.catalogue.card(name)),
                self.status: note(f"Ready to draw with {name}"),
            }
        except PROBLEMS as error:
            return {self.status: problem(error)}
        return updates | ready if updates else {self.status: gr.skip()}

    def try_example(self, name: str, event: gr.EventData) -> Updates:
        """Fill the form with the settings of the clicked example. The page then starts the run."""
        example = example_of(self.shared.catalogue.card(name), event)
        return self._fill(example.record, f"the example {example.subject}")

    def use(self, chosen: Drawn | None) -> Updates:
        """Fill the form with the settings of a picture of this session."""
        try:
            chosen = required(chosen)
            record = form_settings(chosen.record, chosen.path.name, self.form.limits)
            record, notices = with_inputs(record, chosen.path, self.form.limits)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        is_single = AXES not in record and not isinstance(chosen.record["seed"], list)
        return self._fill(record, f"seed {record['seed']}" if is_single else chosen.path.name, notices)

    def restore(self, data: Mapping[Component, Any]) -> Updates:
        """Fill the form with the settings inside an uploaded picture, and delete the upload."""
        try:
            path = uploaded_path(data[self.upload])
            try:
                foreign = read_foreign(path, self.form.limits)
                if not foreign:
                    record, notices = with_inputs(read_record(path, self.form.limits), path, self.form.limits)
            finally:
                path.unlink(missing_ok=True)
        except PROBLEMS as error:
            return {self.status: problem(error), self.upload: None}
        if foreign:
            return self._fill_foreign(foreign, path.name, data) | {self.upload: None}
        return self._fill(record, path.name, notices) | {self.upload: None}

    def _fill_foreign(self, foreign: Foreign, name: str, data: Mapping[Component, Any]) -> Updates:
        """Fill the form with each value of another tool that the model accepts. The status line names the others.

        The single file that drew the picture is chosen if it is here. Otherwise, a prompt that the chosen model cannot
        read chooses a model that reads text.
        """
        try:
            asked = self.form.request(data)
            before = self.shared.catalogue.card(asked.model)
            cards = self.shared.catalogue.cards()
            own = find_of_tool(foreign.model, foreign.model_hash, files_of(cards))
            card = next((each for each in cards if each.name == own), None) or _reader(before, foreign, cards)
            if card.name != before.name:
                counts = {"num_images": asked.num_images, "batch_size": asked.batch_size, "seed": asked.seed}
                asked = UncheckedRequest(model=card.name, prompt="", **counts)
            values, missing = dict(foreign.values), list[str]()
            if values.get("prompt_syntax") == "weighted":
                values["prompt"], missing = self.shared.catalogue.option_files.without_missing(values["prompt"], card)
            asked, taken = _fit(asked, card, values, self.prepare)
            updates = self.form.show_request(card, asked)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        left = [*(field_name(key) for key in foreign.values if key not in taken), *foreign.lacking]
        names = [*map(field_name, taken)]
        if own is not None:
            left, names = [each for each in left if each != MODEL], [MODEL, *names]
        said = f"Loaded from {name} (made by {foreign.tool}): {', '.join(names) or 'nothing'}"
        is_chosen = card.name not in (before.name, own)
        said += f"; chose {card.name}, because {before.name} reads no prompts" if is_chosen else ""
        said += f"; not supported by {card.name}: {', '.join(left)}" if left else ""
        said += f"; not here: the LoRA {' and '.join(missing)}" if missing else ""
        return updates | {self.examples: fit_examples(card), self.status: note(said)}

    def _fill(self, record: Mapping[str, Any], name: str, notices: Sequence[str] = ()) -> Updates:
        """Fill the form with the settings `record` of the picture `name`. The status line ends with `notices`."""
        try:
            record, other = with_files_here(record, name, self.shared.catalogue)
            asked = UncheckedRequest.from_record(record)
            run = self.prepare(asked)
            if AXES in record:
                prepare_sheet(asked, record[AXES], self.shared, self.form.limits)
            if not run.card.reads_text and not LabelPickers.offers(run.card, record["label"]):
                raise InputError(f"label {record['label']} is not available in this form; choose another")
            here = run.request.as_record()
            others = [key for key in UNSHOWN if record.get(key) not in (None, here.get(key))]
            scales = {name: getattr(run.request, name) for name in ("control_scale", "ip_adapter_scale")}
            scales = {name: each[0] for name, each in scales.items() if each}  # bulk may leave them out
            updates = self.form.show(run.card, {**record, **scales})
        except PROBLEMS as error:
            return {self.status: problem(error)}
        first = f"the first of {record['grid_of']} pictures in " if "grid_of" in record else ""
        done = f"Loaded the settings of {first}{name}{', and its axes' if AXES in record else ''}"
        done += f"; not restored: {' and '.join(others)}" if others else ""
        done += "".join(f"; {line}" for line in (*notices, *other))
        return updates | {self.examples: fit_examples(run.card), self.status: note(done)}


def _seed_shown(session: Session, chosen: Drawn | None) -> int | None:
    """Return the seed of the picture on the stage, or of the first one in the grid."""
    drawn = chosen or next(iter(session.drawn), None)
    return None if drawn is None else drawn.record["seed"]


def _told(job: Job) -> str:
    """Return the HTML of the status line of a finished run."""
    view: View = job.views[0]
    of_sheet = view.run is None
    drew = f"Drew {number_of_pictures(len(view.drawn) - of_sheet)}{' and their sheet' if of_sheet else ''}"
    return note("; ".join([f"{drew} in {view.seconds:.1f} s", *view.notices]))


def _reader(card: ModelCard, foreign: Foreign, cards: Sequence[ModelCard]) -> ModelCard:
    """Return `card`, or a model that reads text if `foreign` has a prompt that `card` has not as a label.

    Of several such models, the one with the nearest size is chosen.
    """
    prompt, sides = foreign.values["prompt"], (foreign.values.get("width", 0), foreign.values.get("height", 0))
    readers = [each for each in cards if each.reads_text]
    if card.reads_text or not prompt or LabelPickers.offers(card, prompt) or not readers:
        return card
    area = sides[0] * sides[1]
    return min(readers, key=lambda each: abs(area - (each.size[0] * each.size[1] if each.size else 0)))


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
