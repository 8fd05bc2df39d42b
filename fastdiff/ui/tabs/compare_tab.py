"""The Compare tab: one seed drawn with two settings, with the seconds each took and how far the pictures differ."""

import html
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from gradio.components import Component
from PIL import Image

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.runs.drawing import Run
from fastdiff.ui.drawn import Drawn, draw
from fastdiff.ui.limits import Limits
from fastdiff.ui.messages import PROBLEMS, note, problem
from fastdiff.ui.models import Models
from fastdiff.ui.options import Options, prepare
from fastdiff.ui.session import Session
from fastdiff.ui.tabs.controls import Sampling, Subject, Updates, model_picker, seed_field
from fastdiff.ui.tabs.progress import PREVIEW_INTERVAL, bar, preview
from fastdiff.ui.tabs.prompt import PromptBoxes
from fastdiff.ui.tabs.running import QUICK, Buttons


@dataclass(frozen=True)
class Side:
    """One of the two settings."""

    name: str
    model: gr.Dropdown
    fitted: gr.State  # the name of the model that the controls fit
    sampling: Sampling

    @classmethod
    def build(cls, name: str, models: Models, card: ModelCard, limits: Limits, steps: int) -> "Side":
        with gr.Row(elem_classes="side"):
            gr.Markdown(f"### {name}")
            model = model_picker(models, card)
            sampling = Sampling.build(models, card, limits, {"num_inference_steps": steps}, picker=gr.Dropdown)
            return cls(name, model, gr.State(card.name), sampling)

    @property
    def components(self) -> list[Component]:
        return [self.model, self.fitted, *self.sampling.components]


@dataclass(frozen=True)
class Result:
    """The picture of one side, with its live preview before, and the way back to the form."""

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
    models: Models
    limits: Limits
    session: gr.State
    subject: Subject
    boxes: PromptBoxes
    seed: gr.Number
    sides: tuple[Side, Side]
    buttons: Buttons
    status: gr.HTML
    slider: gr.ImageSlider
    results: tuple[Result, Result]

    @classmethod
    def build(cls, models: Models, card: ModelCard, limits: Limits, session: gr.State) -> "CompareTab":
        gr.Markdown("Draw one seed with two settings: what does a step, a scheduler or another model change?")
        subject = Subject.build(card)
        boxes = PromptBoxes.build(models, card)
        seed = seed_field()
        steps = models.default_sampling(card).num_inference_steps
        sides = (
            Side.build("A", models, card, limits, steps),
            Side.build("B", models, card, limits, max(1, steps // 2)),
        )
        buttons = Buttons.build("Compare")
        status = gr.HTML(note("Choose two settings and press Compare."), min_height=60, padding=True)
        with gr.Row():
            results = Result.build("A"), Result.build("B")
        slider = gr.ImageSlider(label="A and B: drag the line", format="png", interactive=False, max_height=400)
        tab = cls(models, limits, session, subject, boxes, seed, sides, buttons, status, slider, results)
        tab._connect()
        return tab

    def _connect(self) -> None:
        pickers = [side.model for side in self.sides]
        subject = [*self.subject.components, *self.boxes.components]
        controls = [*subject, *(each for side in self.sides for each in side.components)]
        for side in self.sides:
            followers = [side.fitted, *side.sampling.components, *subject, self.status]
            side.model.input(self._follow(side), {*controls}, followers, **QUICK)
        self.subject.follow(self.models, pickers[0])
        self.boxes.follow(self.models, pickers)
        outputs = [self.slider, *(each for result in self.results for each in result.components)]
        typed: list[gr.Textbox | gr.Number] = [self.boxes.prompt, self.boxes.negative_prompt, self.seed]
        self.buttons.connect(
            typed,
            self.run,
            {*controls, self.seed, self.session},
            self.status,
            outputs,
            live=[each.live for each in self.results],
        )

    def _follow(self, side: Side) -> Callable[[Mapping[Component, Any]], Updates]:
        pickers = [each.model for each in self.sides]

        def follow(data: Mapping[Component, Any]) -> Updates:
            """Fit the controls to a model: labels to that of A, prompts to both, each side's sampling to its own."""
            name, before = data[side.model], data[side.fitted]
            if name == before:
                return {self.status: gr.skip()}
            try:
                cards = self.models.card(before), self.models.card(name)
                updates = self.boxes.fit(self.models, [self.models.card(data[each]) for each in pickers], data)
                updates |= side.sampling.fit(self.models, cards, self.limits, data) | {side.fitted: name}
            except PROBLEMS as error:
                return {self.status: problem(error)}
            return updates | (self.subject.fit(cards[1], data) if side is self.sides[0] else {})

        return follow

    def run(self, data: Mapping[Component, Any], request: gr.Request) -> Iterator[Updates]:
        """Draw A, then B. Yields after each step, where Gradio can end the run."""
        session: Session = data[self.session]
        try:
            runs = [self._prepare(side, data) for side in self.sides]
            start: Updates = {self.status: note("Starting"), self.slider: None}
            yield start | {result.picture: None for result in self.results}
            paths: list[Path] = []
            seconds: list[float] = []
            for side, run, result in zip(self.sides, runs, self.results, strict=True):
                previewed = 0.0
                for progress, drawn in draw(run, self.models, session.shelf(request).new_folder()):
                    updates: Updates = {self.status: bar(progress, side.name)}
                    if time.monotonic() - previewed > PREVIEW_INTERVAL:
                        previewed = time.monotonic()
                        updates[result.live] = preview(progress)
                    yield updates
                    paths += [each.path for each in drawn]
                seconds.append(progress.seconds)
                yield result.show(drawn[0])
        except PROBLEMS as error:
            yield {self.status: problem(error), **{each.live: "" for each in self.results}, **self.buttons.free}
            return
        yield {
            self.slider: tuple(map(str, paths)),
            self.status: comparison_table(seconds, difference(*paths)),
            **self.buttons.free,
        }

    def send(self, chosen: Drawn | None) -> Updates:
        """Both settings as those of a picture, to change one of them."""
        try:
            if chosen is None:
                raise InputError("no picture is chosen; click one first")
            record = chosen.record
            card = self.models.card(record["model"])
            boxes = PromptBoxes.properties(self.models, [card], record)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        updates = self.subject.updates(Subject.properties(card, record["label"])) | self.boxes.updates(boxes)
        for side in self.sides:
            updates |= {side.model: card.name, side.fitted: card.name}
            updates |= side.sampling.updates(Sampling.properties(self.models, card, self.limits, record))
        has_own = (record.get("width"), record.get("height")) in ((None, None), card.size)
        size = "" if has_own else "; the size is the model's own here"
        done = note(f"A and B are as seed {record['seed']}{size}. Change one of them and press Compare.")
        return updates | {self.seed: record["seed"], self.status: done}

    @property
    def shown(self) -> list[Component]:
        """The components that `send` changes."""
        sides = [each for side in self.sides for each in side.components]
        return [*self.subject.components, *self.boxes.components, *sides, self.seed, self.status]

    def _prepare(self, side: Side, data: Mapping[Component, Any]) -> Run:
        card = self.models.card(data[side.model])
        label = self.subject.chosen(data) if card.labels else None
        chosen = self.boxes.chosen(data, card) | side.sampling.chosen(data, card)
        options = Options(model=card.name, label=label, seed=data[self.seed], **chosen)
        return prepare(options, self.models, self.limits)


def difference(a: Path, b: Path) -> str:
    """The difference of two pictures in words; levels are 0 to 255."""
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
