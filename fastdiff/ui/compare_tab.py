"""The Compare tab: draw one seed with two settings, and show both times and the difference of the pictures."""

import html
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from gradio.components import Component
from PIL import Image

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.ui.drawing import Drawn, Session, draw, prepare
from fastdiff.ui.engine import Engine
from fastdiff.ui.gallery import required
from fastdiff.ui.parts.form import Form
from fastdiff.ui.parts.messages import PROBLEMS, note, problem
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.parts.running import QUICK, Buttons, Updates, starting
from fastdiff.ui.parts.upload import form_settings
from fastdiff.ui.progress import bar, with_previews


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

    def show(self, drawn: Drawn) -> Updates:
        return {
            self.live: "",
            self.picture: str(drawn.path),
            self.drawn: drawn,
            self.use: gr.update(visible=True),
        }


@dataclass(frozen=True)
class CompareTab:
    engine: Engine
    form: Form
    session: gr.State
    buttons: Buttons
    status: gr.HTML
    slider: gr.ImageSlider
    results: tuple[Result, Result]

    @classmethod
    def build(cls, engine: Engine, card: ModelCard, limits: Limits, session: gr.State) -> "CompareTab":
        gr.Markdown(
            "Draw one seed with two settings, and see what the steps, the scheduler or the model change. "
            "To compare many values at once, use the X/Y sheet in the Draw tab."
        )
        form = Form.build(engine.catalogue, card, limits)
        buttons = Buttons.build("Compare")
        status = gr.HTML(
            note("Choose two settings and press Compare."), elem_classes="status", min_height=60, padding=True
        )
        with gr.Row():
            results = Result.build("A"), Result.build("B")
        slider = gr.ImageSlider(
            label="A and B (drag to compare)", format="png", interactive=False, max_height=400, visible=False
        )
        tab = cls(engine, form, session, buttons, status, slider, results)
        tab._connect()
        return tab

    def _connect(self) -> None:
        for side, controls in enumerate(self.form.sides):
            controls.model.input(self._follow(side), {*self.form.components}, self.shown, **QUICK)
        self.form.follow()
        self.buttons.connect(
            self.form.typed,
            self.run,
            {*self.form.components, self.session},
            self.status,
            [self.slider, *(each for result in self.results for each in result.components)],
            live=[each.live for each in self.results],
        )

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

    def run(self, data: Mapping[Component, Any], request: gr.Request) -> Iterator[Updates]:
        """Draw A, then B. Yields after each step, where Gradio can cancel the run."""
        session: Session = data[self.session]
        runs = [prepare(self.form.request(data, side), self.engine, self.form.limits) for side in range(2)]
        start: Updates = {self.status: starting(self.engine.turns), self.slider: None}
        yield start | {result.picture: None for result in self.results}
        paths: list[Path] = []
        seconds: list[float] = []
        for name, run, result in zip("AB", runs, self.results, strict=True):
            steps = draw(run, self.engine, session.shelf(request).new_folder())
            for progress, drawn, live in with_previews(steps):
                updates: Updates = {self.status: bar(progress, name)}
                yield updates if live is None else updates | {result.live: live}
                paths += [each.path for each in drawn]
            seconds.append(progress.seconds)
            yield result.show(drawn[0])
        yield {
            self.slider: gr.update(value=tuple(map(str, paths)), visible=True),
            self.status: comparison_table(seconds, difference(*paths)),
            **self.buttons.free,
        }

    def send(self, chosen: Drawn | None) -> Updates:
        """Fill in the settings of a picture for both A and B, so the user can change one of them."""
        try:
            chosen = required(chosen)
            record = form_settings(chosen.record, chosen.path.name, self.form.limits)
            updates = self.form.show(self.engine.catalogue.card(record["model"]), record)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        done = note(f"A and B have the settings of seed {record['seed']}. Change one and press Compare.")
        return updates | {self.status: done}


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
    return f'<dl class="settings" role="status">{cells}</dl>'
