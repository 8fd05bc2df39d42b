"""The fields that only Draw has: the start picture and its mask, the prompt's syntax, and enlarging."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.requests.completion import default_strength
from fastdiff.requests.defaults import STRENGTH, UPSCALE_MODE, UPSCALE_STRENGTH
from fastdiff.requests.syntax import EMPHASIS, SYNTAX
from fastdiff.ui.inputs.mask import PAINT
from fastdiff.ui.parts.controls import Controls, Properties
from fastdiff.ui.parts.picture_section import picture_field
from fastdiff.ui.queueing.running import QUICK, Updates

MAX_UPSCALE = 4  # of the slider; a restored picture can have more
EDITOR = "editor"  # beside the settings of a picture: the HTML of the mask's editor
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
    editor: gr.HTML  # over the start picture
    mask: gr.Textbox  # always hidden: what the editor sends, or the path of an upload
    mask_blur: gr.Slider

    @classmethod
    def build(cls, card: ModelCard) -> "StartControls":
        with gr.Accordion("Start picture", open=False, visible=card.reads_text, elem_id="start") as box:
            picture = picture_field("Start picture", "start-picture")
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
            editor = gr.HTML(
                js_on_load=PAINT, apply_default_css=False, visible=False, elem_id="mask", elem_classes="paint"
            )
            mask = gr.Textbox("", label="Mask", visible=False)
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
        editor.input(None, None, mask, js="() => window.painted", **QUICK)
        return cls(box, picture, strength, masks, editor, mask, blur)

    @property
    def components(self) -> list[Component]:
        """The fields whose values the browser stores."""
        return [self.picture, self.strength, self.masks, self.mask, self.mask_blur]

    @property
    def shown(self) -> list[Block]:
        """The components that `fit`, `show` and `begin` change."""
        return [self.box, *self.components, self.editor]

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of these controls, or none without a picture."""
        if data[self.picture] is None or not card.reads_text:
            return {}
        own = {"init_image": data[self.picture], "strength": data[self.strength]}
        if data[self.masks] is not True:
            return own
        return own | {"mask": data[self.mask] or "", "mask_blur": data[self.mask_blur]}

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

    def show(self, card: ModelCard, record: Mapping[str, Any]) -> Updates:
        """Fit the controls to `card`, and fill in the settings of a `record`: uploads, and EDITOR for a mask."""
        picture, strength = record.get("init_image"), record.get("strength")
        path = picture["path"] if isinstance(picture, dict) else picture
        opened: dict[str, Any] = {} if path is None else {"open": True}
        value = None if path is None else record.get(EDITOR)
        return {
            self.box: gr.update(visible=card.reads_text, **opened),
            self.picture: path,
            self.strength: _strength(card, masked=value is not None) if strength is None else strength,
            **self.paint(value, record.get("mask") or "", record.get("mask_blur") or 0),
            self.masks: gr.update(value=value is not None, visible=path is not None),
        }

    def begin(self, card: ModelCard, path: Path, value: str | None = None) -> Updates:
        """Put a picture into the open section. value: of the mask's editor."""
        return {
            self.box: gr.update(open=True),
            self.picture: str(path),
            self.strength: _strength(card, masked=value is not None),
            **self.paint(value),
            self.masks: gr.update(value=value is not None, visible=True),
        }

    def paint(self, value: str | None, mask: Any = "", blur: float = 0) -> Updates:
        """Show the editor with a value and the mask that is in it, or hide it."""
        shown = value is not None
        return {
            self.editor: gr.update(value=value or "", visible=shown),
            self.mask: mask if shown else "",
            self.mask_blur: gr.update(value=blur, maximum=max(MAX_BLUR, blur), visible=shown),
        }

    def mask_strength(self, card: ModelCard, strength: Any, *, masked: bool) -> float:
        """Return the strength after the mask was turned on or off: the default, unless the user changed it."""
        return _strength(card, masked=masked) if strength == _strength(card, masked=not masked) else strength


def _strength(card: ModelCard, *, masked: bool) -> float:
    return default_strength(card, masked=masked) if card.reads_text else STRENGTH


@dataclass(frozen=True)
class PromptingControls(Controls):
    """How a run reads its prompt, and which part of it is guided. For models that read text."""

    guidance_start: gr.Slider
    guidance_stop: gr.Slider
    prompt_syntax: gr.Dropdown
    emphasis: gr.Dropdown

    @classmethod
    def build(cls, card: ModelCard) -> "PromptingControls":
        properties = cls.properties(card)

        def share(name: str, label: str, info: str) -> gr.Slider:
            return gr.Slider(0, 1, step=0.05, label=label, info=info, min_width=140, **properties[name])

        with gr.Row(elem_classes="interval"):
            interval = (
                share("guidance_start", "Guidance from", "0 is the first step"),
                share("guidance_stop", "Guidance until", "1 is the last step"),
            )
        with gr.Row(elem_classes="syntax"):
            prompting = cls(
                *interval,
                prompt_syntax=gr.Dropdown(
                    [("Plain", SYNTAX), ("Weighted, as in A1111", "weighted")],
                    label="Prompt syntax",
                    info="Weighted reads (word:1.2), [a:b:0.5], BREAK and long prompts",
                    min_width=180,
                    **properties["prompt_syntax"],
                ),
                emphasis=gr.Dropdown(
                    [("Original", EMPHASIS), ("No norm", "no-norm")],
                    label="Emphasis",
                    info="No norm suits SDXL",
                    min_width=120,
                    **properties["emphasis"],
                ),
            )
        prompting.prompt_syntax.change(
            lambda syntax: gr.update(visible=syntax == "weighted"), prompting.prompt_syntax, prompting.emphasis, **QUICK
        )
        return prompting

    @staticmethod
    def properties(card: ModelCard, record: Mapping[str, Any] | None = None) -> Properties:
        """Return the properties for `card`, with the values of a picture's `record` or the defaults."""
        chosen: dict[str, Any] = {
            "guidance_start": 0,
            "guidance_stop": 1,
            "prompt_syntax": SYNTAX,
            "emphasis": EMPHASIS,
        }
        chosen |= {name: record[name] for name in chosen if record and record.get(name) is not None}
        properties = {name: {"value": value, "visible": card.reads_text} for name, value in chosen.items()}
        properties["emphasis"]["visible"] = card.reads_text and chosen["prompt_syntax"] == "weighted"
        return properties

    def fit(self, card: ModelCard, data: Mapping[Component, Any]) -> Updates:
        """Fit the controls to another model, with the values that they have."""
        return self.updates(self.properties(card, {name: data[field] for name, field in vars(self).items()}))

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of these controls, or none for a model without prompts."""
        if not card.reads_text:
            return {}
        values = {name: data[field] for name, field in vars(self).items()}
        return values | ({} if values["prompt_syntax"] == "weighted" else {"emphasis": None})


@dataclass(frozen=True)
class UpscaleControls(Controls):
    """For models that read text."""

    upscale: gr.Slider
    upscale_strength: gr.Slider
    upscale_mode: gr.Dropdown

    @classmethod
    def build(cls, card: ModelCard) -> "UpscaleControls":
        properties = cls.properties(card)
        with gr.Row(elem_classes="upscale"):
            controls = cls(
                gr.Slider(
                    1,
                    step=0.25,
                    label="Upscale",
                    info="Draws, enlarges and goes on; 1 is off",
                    min_width=180,
                    **properties["upscale"],
                ),
                gr.Slider(
                    0.05,
                    1,
                    step=0.05,
                    label="Upscale strength",
                    info="How much of it changes",
                    min_width=140,
                    **properties["upscale_strength"],
                ),
                gr.Dropdown(
                    [("Pixels", UPSCALE_MODE), ("Latents: strength 0.55 to 0.7", "latent")],
                    label="Upscale mode",
                    info="What is enlarged",
                    min_width=140,
                    **properties["upscale_mode"],
                ),
            )
        others = [controls.upscale_strength, controls.upscale_mode]
        controls.upscale.change(
            lambda upscale: [gr.update(visible=_is_on(upscale))] * len(others), controls.upscale, others, **QUICK
        )
        return controls

    @staticmethod
    def properties(card: ModelCard, record: Mapping[str, Any] | None = None) -> Properties:
        """Return the properties for `card`, with the values of a picture's `record` or the defaults."""
        chosen: dict[str, Any] = {
            "upscale": 1,
            "upscale_strength": UPSCALE_STRENGTH,
            "upscale_mode": UPSCALE_MODE,
        }
        chosen |= {name: record[name] for name in chosen if record and record.get(name) is not None}
        is_on = card.reads_text and _is_on(chosen["upscale"])
        properties = {name: {"value": value, "visible": is_on} for name, value in chosen.items()}
        properties["upscale"] |= {"visible": card.reads_text, "maximum": max(MAX_UPSCALE, chosen["upscale"])}
        return properties

    def fit(self, card: ModelCard, data: Mapping[Component, Any]) -> Updates:
        """Fit the controls to another model, with the values that they have."""
        return self.updates(self.properties(card, {name: data[field] for name, field in vars(self).items()}))

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of these controls, or none if nothing is enlarged."""
        if not card.reads_text or data[self.upscale] == 1:
            return {}
        return {name: data[field] for name, field in vars(self).items()}


def _is_on(upscale: Any) -> bool:
    return isinstance(upscale, int | float) and upscale > 1
