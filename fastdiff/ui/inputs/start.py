"""The form's start picture: the picture that a run changes, how much it changes, and where."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.requests.completion import default_strength
from fastdiff.requests.defaults import STRENGTH
from fastdiff.ui.inputs.mask import build_editor, editor_value, painted
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.parts.running import Updates

MAX_BLUR = 64  # pixels, of the slider; a restored picture can have more
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
    masks: gr.Checkbox  # whether there is a mask
    editor: gr.ImageEditor  # with the mask; its value travels only with a run
    mask_blur: gr.Slider

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
                value=_strength(card, masked=False),
                step=0.05,
                label="Strength",
                info="How much of the start picture changes",
                min_width=140,
            )
            masks = gr.Checkbox(
                label="Paint a mask", info="Only what you paint white changes", visible=False, min_width=140
            )
            editor = build_editor()
            blur = gr.Slider(
                0,
                MAX_BLUR,
                value=0,
                step=1,
                label="Mask blur",
                info="Radius in pixels; moves the edge",
                min_width=140,
                visible=False,
            )
        return cls(box, picture, strength, masks, editor, blur)

    @property
    def components(self) -> list[Component]:
        """The fields whose values the browser stores."""
        return [self.picture, self.strength, self.mask_blur]

    @property
    def masking(self) -> list[Component]:
        """The fields of the mask, which the browser does not store."""
        return [self.masks, self.editor]

    @property
    def shown(self) -> list[Block]:
        """The components that `fit`, `show` and `begin` change."""
        return [self.box, *self.components, *self.masking]

    def chosen(self, data: Mapping[Component, Any], card: ModelCard, limits: Limits) -> dict[str, Any]:
        """Return the UncheckedRequest fields of these controls, or none without a picture.

        Raises InputError as `painted`, if `data` has the editor.
        """
        if data[self.picture] is None or not card.reads_text:
            return {}
        own = {"init_image": data[self.picture], "strength": data[self.strength]}
        if data.get(self.masks) is not True or self.editor not in data:
            return own
        return own | {"mask": str(painted(data[self.editor], limits)), "mask_blur": data[self.mask_blur]}

    def fit(self, cards: tuple[ModelCard, ModelCard], data: Mapping[Component, Any]) -> Updates:
        """Fit the controls to `cards[1]`: its strength, unless the user changed the strength of `cards[0]`."""
        before, card = cards
        masked = data.get(self.masks) is True
        strength = data[self.strength]
        is_own = not before.reads_text or strength == _strength(before, masked=masked)
        return {
            self.box: gr.update(visible=card.reads_text),
            self.strength: _strength(card, masked=masked) if is_own and card.reads_text else strength,
        }

    def show(self, card: ModelCard, record: Mapping[str, Any], limits: Limits) -> Updates:
        """Fit the controls to `card`, and fill in uploaded files and the other settings of a `record`.

        Raises InputError as `editor_value`.
        """
        picture, strength, mask = (record.get(name) for name in ("init_image", "strength", "mask"))
        path = picture["path"] if isinstance(picture, dict) else picture
        opened: dict[str, Any] = {} if path is None else {"open": True}
        masked = path is not None and mask is not None
        return {
            self.box: gr.update(visible=card.reads_text, **opened),
            self.picture: path,
            self.strength: _strength(card, masked=masked) if strength is None else strength,
            **self.paint(path if masked else None, mask, limits, record.get("mask_blur") or 0),
            self.masks: gr.update(value=masked, visible=path is not None),
        }

    def begin(self, card: ModelCard, path: Path, limits: Limits, *, masked: bool = False) -> Updates:
        """Put a picture into the open section. Raises InputError as `editor_value`."""
        return {
            self.box: gr.update(open=True),
            self.picture: str(path),
            self.strength: _strength(card, masked=masked),
            **self.paint(str(path) if masked else None, None, limits),
            self.masks: gr.update(value=masked, visible=True),
        }

    def paint(self, start: str | None, mask: str | None, limits: Limits, blur: float = 0) -> Updates:
        """Show the editor with a start picture and a mask, or hide it. Raises InputError as `editor_value`."""
        if start is None:
            return {
                self.editor: gr.update(value=None, visible=False),
                self.mask_blur: gr.update(value=0, visible=False),
            }
        value = editor_value(Path(start), None if mask is None else Path(mask), limits)
        return {
            self.editor: gr.update(value=value, visible=True),
            self.mask_blur: gr.update(value=blur, maximum=max(MAX_BLUR, blur), visible=True),
        }

    def mask_strength(self, card: ModelCard, strength: Any, *, masked: bool) -> float:
        """Return the strength after the mask was turned on or off: the default, unless the user changed it."""
        return _strength(card, masked=masked) if strength == _strength(card, masked=not masked) else strength


def _strength(card: ModelCard, *, masked: bool) -> float:
    return default_strength(card, masked=masked) if card.reads_text else STRENGTH


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
