"""The Compare tab: draw one seed with two settings, and show both times and the difference of the pictures."""

import functools
import html
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from gradio.blocks import Block
from gradio.components import Component
from PIL import Image

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.hosting.catalogue.controlnets import ControlNets
from fastdiff.hosting.catalogue.ip_adapters import IPAdapters
from fastdiff.requests.request import INPUT_SETTINGS, UPSCALE_SETTINGS
from fastdiff.ui.drawing import Drawn, Session, draw, prepare, with_files_here
from fastdiff.ui.gallery import required
from fastdiff.ui.parts.form import Form
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.parts.upload import form_settings, numerics_notice
from fastdiff.ui.progress import View
from fastdiff.ui.queueing.messages import PROBLEMS, field_name, note, problem
from fastdiff.ui.queueing.queue import Job
from fastdiff.ui.queueing.running import QUICK, RunControls, Updates, status_of, title_of
from fastdiff.ui.shared import Shared, models_of

KIND = "Compare"  # of jobs
# settings whose fields only Draw has
UNSHOWN = (
    *(*INPUT_SETTINGS, *UPSCALE_SETTINGS, *ControlNets.settings(), *IPAdapters.settings()),
    *("guidance_start", "guidance_stop", "prompt_syntax", "emphasis"),
)


@dataclass(frozen=True)
class Result:
    """The live preview and the picture of one side, and the button that sends its settings to Draw."""

    live: gr.HTML
    picture: gr.Image
    use: gr.Button
    drawn: gr.State  # Drawn

    @classmethod
    def build(cls, name: str) -> "Result":
        with gr.Column(min_width=140, elem_classes="stage-column"):
            live = gr.HTML(elem_classes="live")
            picture = gr.Image(
                label=name,
                format="png",
                interactive=False,
                height=320,
                buttons=["download", "fullscreen"],
                elem_classes="enlarged",
            )
            use = gr.Button(f"Use the settings of {name}", size="sm", visible="hidden")
        return cls(live, picture, use, gr.State(None))

    @property
    def components(self) -> list[Component]:
        return list(vars(self).values())

    def show(self, drawn: Drawn | None, live: str) -> Updates:
        return {
            self.live: live,
            self.picture: None if drawn is None else str(drawn.path),
            self.drawn: drawn,
            self.use: gr.update(visible="hidden" if drawn is None else True),
        }


@dataclass(frozen=True)
class CompareTab:
    shared: Shared
    form: Form
    session: gr.State
    timer: gr.Timer
    controls: RunControls
    status: gr.HTML
    slider: gr.ImageSlider
    results: tuple[Result, Result]

    @classmethod
    def build(cls, shared: Shared, card: ModelCard, limits: Limits, session: gr.State, timer: gr.Timer) -> "CompareTab":
        gr.Markdown(
            "Draw one seed with two settings, and see what the steps, the scheduler or the model change. "
            "To compare many values at once, use the X/Y sheet in the Draw tab."
        )
        status = gr.HTML(note("Choose two settings and press Compare."), elem_classes="status", padding=True)
        with gr.Row():
            results = Result.build("A"), Result.build("B")
        slider = gr.ImageSlider(
            label="A and B (drag to compare)", format="png", interactive=False, max_height=400, visible=False
        )
        form = Form.build(shared.catalogue, card, limits)
        controls = RunControls.build("Compare")
        tab = cls(shared, form, session, timer, controls, status, slider, results)
        tab._connect()
        return tab

    def _connect(self) -> None:
        for side, controls in enumerate(self.form.sides):
            # a quick second pick still sends choices of the model before
            inputs: set[Block] = {*self.form.components}
            controls.model.input(self._follow(side), inputs, self.shown, preprocess=False, **QUICK)
        self.form.follow()
        self.form.boxes.offer_recent(self.session)
        self.controls.connect(self.form.typed, self.add, {*self.form.components, self.session}, self.timer)
        self.form.seeds.connect([self.results[0].drawn], lambda drawn: drawn and drawn.record["seed"])

    @property
    def shown(self) -> list[Component]:
        """The components that change with the model or the settings."""
        return [*self.form.components, self.status]

    def _follow(self, side: int) -> Callable[[Mapping[Component, Any]], Updates]:
        def follow(data: Mapping[Component, Any]) -> Updates:
            """Fit the controls and their defaults to the chosen model."""
            try:
                return self.form.fit(data, side) or {self.status: gr.skip()}
            except PROBLEMS as error:
                return {self.status: problem(error)}

        return follow

    def add(self, data: Mapping[Component, Any], request: gr.Request) -> Updates:
        """Add a job that draws A, then B. Raises InputError like `prepare`, and if too many runs wait."""
        session: Session = data[self.session]
        shelf, limits = session.shelf(request), self.form.limits
        shelf.new_folder()  # raises if the quota is used up
        first, second = (self.form.request(data, side) for side in range(2))
        first = limits.check(first)
        asked = [first, replace(second, seed=first.seed)]
        runs = [prepare(each, self.shared, limits) for each in asked]
        views = [View(name) for name in "AB"]

        def steps() -> Generator[float, None, None]:
            for done, (run, view) in enumerate(zip(runs, views, strict=True)):
                with closing(view.follow(draw(run, self.shared, shelf.new_folder()))) as fractions:
                    for fraction in fractions:
                        yield (done + fraction) / 2

        title = title_of(f"Comparison: {asked[0].subject}", 2)
        job = Job(session.owner(request), KIND, title, steps(), views, models_of(runs))
        self.shared.queue.add(job, limits.waiting, limits.waiting_of_one)
        return {}

    def follow(self, session: Session, request: gr.Request) -> Updates:
        """Return the updates that show the newest comparison of the user, also if another tab has started it."""
        started = self.shared.queue.started(session.owner(request), KIND)
        if not started:
            return {}
        job = started[0]
        updates: Updates = {self.status: status_of(job, _told)}
        for result, view in zip(self.results, job.views, strict=True):
            updates |= result.show(next(filter(_exists, view.drawn), None), view.live if not job.has_ended else "")
        drawn = [each for view in job.views for each in view.drawn if _exists(each)]
        pair = tuple(str(each.path) for each in drawn) if len(drawn) == 2 and job.has_ended else None
        return updates | {self.slider: gr.update(value=pair, visible=pair is not None)}

    @property
    def followed(self) -> list[Block]:
        """The components that `follow` updates."""
        return [self.status, self.slider, *(each for result in self.results for each in result.components)]

    def send(self, chosen: Drawn | None) -> Updates:
        """Fill in the settings of a picture for both A and B, so the user can change one of them."""
        try:
            chosen = required(chosen)
            record = form_settings(chosen.record, chosen.path.name, self.form.limits)
            notice = numerics_notice(chosen.path)
            record, other = with_files_here(record, chosen.path.name, self.shared.catalogue)
            updates = self.form.show(self.shared.catalogue.card(record["model"]), record)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        done = f"A and B have the settings of seed {record['seed']}. Change one and press Compare."
        unshown = ", ".join(field_name(key) for key in UNSHOWN if record.get(key) is not None)
        other += [f"Not restored: {unshown}"] if unshown else []
        return updates | {self.status: note(" ".join([done, *(f"{line}." for line in (notice, *other) if line)]))}


def _exists(drawn: Drawn) -> bool:
    """Return whether a picture has not been deleted."""
    return drawn.path.exists()


def _told(job: Job) -> str:
    """Return the HTML of the status line of a finished comparison."""
    drawn = [each for view in job.views for each in view.drawn]
    if not all(map(_exists, drawn)):
        return note("A picture of this comparison was deleted.")
    return comparison_table([view.seconds for view in job.views], difference(*(each.path for each in drawn)))


@functools.lru_cache(16)
def difference(a: Path, b: Path) -> str:
    """Describe the difference between two pictures in words; pixel values are 0 to 255."""
    with Image.open(a) as first, Image.open(b) as second:
        pixels = [np.asarray(image, dtype=np.float32) for image in (first, second)]
    if pixels[0].shape != pixels[1].shape:
        return "the pictures have different sizes"
    error = np.abs(pixels[0] - pixels[1])
    if not error.any():
        return "none: the pictures are identical"
    psnr = 20 * math.log10(255) - 10 * math.log10(float(np.mean(error**2)))
    return f"{error.mean():.1f} of 255 on average, {error.max():.0f} at most, PSNR {psnr:.1f} dB"


def comparison_table(seconds: list[float], differ: str) -> str:
    lines = {"A took": f"{seconds[0]:.2f} s", "B took": f"{seconds[1]:.2f} s", "Pixel difference": differ}
    cells = "".join(f"<dt>{name}</dt><dd>{html.escape(value)}</dd>" for name, value in lines.items())
    return f'<div role="status"><dl class="settings">{cells}</dl></div>'
