"""The form's start picture: the picture that a run changes, and how much it changes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.requests.completion import default_strength
from fastdiff.requests.defaults import STRENGTH
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.parts.running import Updates

# a script that shows the section, which is laid out bit by bit when it opens
SHOW = """() => {
    const section = document.querySelector("#start");
    const grown = new ResizeObserver(() => section.scrollIntoView({block: "nearest", behavior: "smooth"}));
    grown.observe(section);
    setTimeout(() => grown.disconnect(), 1000);
}"""


@dataclass(frozen=True)
class StartControls:
    """A folded section, for models that read text."""

    box: gr.Accordion
    picture: gr.Image
    strength: gr.Slider

    @classmethod
    def build(cls, card: ModelCard) -> "StartControls":
        with gr.Accordion("Start picture", open=False, visible=card.reads_text, elem_id="start") as box:
            picture = gr.Image(
                label="Start picture",
                show_label=False,
                type="filepath",
                sources=["upload", "clipboard"],
                height=240,
                buttons=["fullscreen"],
                elem_id="start-picture",
                elem_classes="enlarged",
                placeholder="Drop a picture here, or click to choose one",
            )
            strength = gr.Slider(
                0.05,
                1,
                value=default_strength(card, masked=False) if card.reads_text else STRENGTH,
                step=0.05,
                label="Strength",
                info="How much of the start picture changes",
                min_width=140,
            )
        return cls(box, picture, strength)

    @property
    def components(self) -> list[Component]:
        return [self.picture, self.strength]

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of these controls, or none without a picture."""
        if data[self.picture] is None or not card.reads_text:
            return {}
        return {"init_image": data[self.picture], "strength": data[self.strength]}

    def fit(self, cards: tuple[ModelCard, ModelCard], data: Mapping[Component, Any]) -> Updates:
        """Fit the controls to `cards[1]`: its strength, unless the user changed the strength of `cards[0]`."""
        before, card = cards
        is_own = not before.reads_text or data[self.strength] == default_strength(before, masked=False)
        strength: dict[str, Any] = {"value": default_strength(card, masked=False)} if is_own and card.reads_text else {}
        return {self.box: gr.update(visible=card.reads_text), self.strength: gr.update(**strength)}

    def show(self, card: ModelCard, record: Mapping[str, Any]) -> Updates:
        """Fit the controls to `card`, and fill in an uploaded picture and the strength of a `record`."""
        picture, strength = record.get("init_image"), record.get("strength")
        opened: dict[str, Any] = {} if picture is None else {"open": True}
        own = default_strength(card, masked=False) if card.reads_text else STRENGTH
        return {
            self.box: gr.update(visible=card.reads_text, **opened),
            self.picture: picture["path"] if isinstance(picture, dict) else picture,
            self.strength: own if strength is None else strength,
        }

    def begin(self, path: str) -> Updates:
        """Put a picture into the open section."""
        return {self.box: gr.update(open=True), self.picture: path}


def size_from(size: tuple[int, int], card: ModelCard, limits: Limits) -> tuple[int, int]:
    """Return the (height, width) to draw a picture of `size` at: its own, in multiples that the model can draw.

    If it exceeds `limits`, it is scaled to as many pixels as the model was trained with.
    """
    multiple, factor = card.size_factor, 1.0
    most = limits.side // multiple * multiple
    if max(size) > most:
        pixels = math.prod(card.size) if card.size else most**2
        factor = min(math.sqrt(pixels / math.prod(size)), most / max(size))
    height, width = (max(1, int(factor * side / multiple)) * multiple for side in size)
    return height, width
