"""The fields of the ControlNet, which only Draw has: its picture, what is made of it, and how much it counts."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.edges import HIGH, LOW
from fastdiff.errors import InputError
from fastdiff.ui.option_files.controlnets import can_be_controlled
from fastdiff.ui.parts.catalogue import Catalogue
from fastdiff.ui.parts.controls import Controls, Properties
from fastdiff.ui.parts.request import CANNY, PREPROCESSOR
from fastdiff.ui.queueing.messages import PROBLEMS
from fastdiff.ui.queueing.running import QUICK, Updates

NO_NET = ""  # the value of the list for no ControlNet
MAX_SCALE = 2  # of the slider; a restored picture can have more
MAX_THRESHOLD = 500  # of the sliders; a restored request of the API can have more
_DEFAULTS: dict[str, Any] = {
    "control": NO_NET,
    "control_image": None,
    "control_preprocessor": CANNY,
    "canny_low": LOW,
    "canny_high": HIGH,
    "control_scale": 1,
    "control_start": 0,
    "control_end": 1,
    "guess_mode": False,
}


@dataclass(frozen=True)
class ControlFields(Controls):
    """The fields by the names of an UncheckedRequest, inside a `ControlSection`."""

    control: gr.Dropdown
    control_image: gr.Image
    control_preprocessor: gr.Radio
    canny_low: gr.Slider
    canny_high: gr.Slider
    control_scale: gr.Slider
    control_start: gr.Slider
    control_end: gr.Slider
    guess_mode: gr.Checkbox

    @staticmethod
    def properties(record: Mapping[str, Any]) -> Properties:
        """Return the properties with the values of a request or a picture. Its picture counts as it is."""
        kept = {name: value for name, value in record.items() if name in _DEFAULTS and value is not None}
        plain = {"control_preprocessor": PREPROCESSOR} if "control_image" in kept else {}
        values = _DEFAULTS | plain | kept
        image = values["control_image"]
        values["control_image"] = image["path"] if isinstance(image, dict) else image
        found: Properties = {name: {"value": value} for name, value in values.items()}
        found["control_scale"] |= _range(0, MAX_SCALE, values["control_scale"])
        for name in ("canny_low", "canny_high"):
            found[name] |= {"visible": values["control_preprocessor"] == CANNY}
            found[name] |= _range(0, MAX_THRESHOLD, values[name])
        return found


def _range(least: float, most: float, value: float) -> dict[str, float]:
    return {"minimum": min(least, value), "maximum": max(most, value)}


@dataclass(frozen=True)
class ControlSection:
    """A folded section, for models with a ControlNet on offer."""

    box: gr.Accordion
    fields: ControlFields
    preview: gr.HTML  # the control picture that is made

    @classmethod
    def build(cls, catalogue: Catalogue, card: ModelCard) -> "ControlSection":
        with gr.Accordion("ControlNet", open=False, visible=_is_for(catalogue, card), elem_id="control") as box:
            properties = ControlFields.properties({})
            net = gr.Dropdown(
                _choices(catalogue, card),
                label="ControlNet",
                info="The result follows a picture",
                allow_custom_value=catalogue.allow_hub,
                **properties["control"],
            )
            picture = gr.Image(
                label="Control picture",
                show_label=False,
                type="filepath",
                sources=["upload", "clipboard"],
                height=240,
                buttons=["fullscreen"],
                elem_id="control-picture",
                elem_classes="enlarged",
                placeholder="Drop a picture here, or click to choose one",
            )
            preprocessor = gr.Radio(
                [("None", PREPROCESSOR), ("Canny edges", CANNY)],
                label="Preprocessor",
                info="None takes the picture as it is",
                **properties["control_preprocessor"],
            )

            def slider(name: str, label: str, info: str, step: float, **more: Any) -> gr.Slider:
                return gr.Slider(label=label, info=info, step=step, min_width=140, **properties[name] | more)

            with gr.Row(elem_classes="thresholds"):
                low = slider("canny_low", "Low threshold", "Weaker edges are left out", 1)
                high = slider("canny_high", "High threshold", "An edge begins here", 1)
            preview = gr.HTML(apply_default_css=False, padding=False, elem_id="control-preview")
            scale = slider("control_scale", "Control scale", "How much the ControlNet counts", 0.05)
            with gr.Row(elem_classes="controlled"):
                share: dict[str, Any] = {"minimum": 0, "maximum": 1}
                start = slider("control_start", "Control from", "0 is the first step", 0.05, **share)
                end = slider("control_end", "Control until", "1 is the last step", 0.05, **share)
            guess = gr.Checkbox(
                label="Guess mode", info="Follow the picture more than the prompt", min_width=140, value=False
            )
        preprocessor.change(lambda chosen: [gr.update(visible=chosen == CANNY)] * 2, preprocessor, [low, high], **QUICK)
        fields = ControlFields(net, picture, preprocessor, low, high, scale, start, end, guess)
        return cls(box, fields, preview)

    @property
    def components(self) -> list[Component]:
        """The fields whose values the browser stores."""
        return self.fields.components

    @property
    def shown(self) -> list[Block]:
        """The components that change with the model or the settings."""
        return [self.box, *self.components]

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of these controls, or none without a ControlNet."""
        values = {name: data[field] for name, field in vars(self.fields).items()}
        if not card.reads_text or values["control"] in (NO_NET, None):
            return {}
        if values["control_preprocessor"] != CANNY:
            values |= {"canny_low": None, "canny_high": None}
        return values

    def fit(self, catalogue: Catalogue, card: ModelCard, data: Mapping[Component, Any]) -> Updates:
        """Fit the controls to another model. Its own ControlNet replaces one that does not fit it."""
        choices, net = _choices(catalogue, card), data[self.fields.control]
        names = [name for _, name in choices]
        if net not in (NO_NET, None, *names):
            net = names[1] if len(names) > 1 else NO_NET
        return {
            self.box: gr.update(visible=_is_for(catalogue, card)),
            self.fields.control: gr.update(choices=choices, value=net),
        }

    def show(self, catalogue: Catalogue, card: ModelCard, record: Mapping[str, Any]) -> Updates:
        """Fit the controls to `card`, and fill in the settings of a `record`."""
        properties = ControlFields.properties(record)
        properties["control"]["choices"] = _choices(catalogue, card)
        opened: dict[str, Any] = {"open": True} if record.get("control") else {}
        return {
            self.box: gr.update(visible=_is_for(catalogue, card), **opened),
            **self.fields.updates(properties),
        }

    def begin(self, catalogue: Catalogue, card: ModelCard, net: Any) -> tuple[str, Updates]:
        """Return the ControlNet for a picture that was just dropped, and the update that chooses it.

        It is the chosen one, or the first one on offer. Raises InputError if there is none.
        """
        choices = _choices(catalogue, card)
        names = [name for _, name in choices if name != NO_NET]
        if net in (NO_NET, None) and not names:
            raise InputError(f"control: there is no ControlNet for {card.name}; choose another model")
        chosen = names[0] if net in (NO_NET, None) else net
        return chosen, {self.fields.control: gr.update(choices=choices, value=chosen)}

    def follow(self, catalogue: Catalogue, model: gr.Dropdown) -> None:
        """List the ControlNets of the folder again when the list is opened."""

        def offer(name: str) -> dict[str, Any]:
            try:
                return gr.update(choices=_choices(catalogue, catalogue.card(name)))
            except PROBLEMS:  # the model no longer exists
                return gr.skip()

        self.fields.control.focus(offer, model, self.fields.control, **QUICK)


def preview_html(path: Path) -> str:
    """Return the HTML of a control picture that was made from another picture."""
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return (
        f'<figure><img alt="Control picture with edges" src="{url}"><figcaption>Control picture</figcaption></figure>'
    )


def _choices(catalogue: Catalogue, card: ModelCard) -> list[tuple[str, str]]:
    return [("None", NO_NET), *((name, name) for name in catalogue.controlnets.offered(card))]


def _is_for(catalogue: Catalogue, card: ModelCard) -> bool:
    """Return whether a user can choose a ControlNet for a model."""
    return can_be_controlled(card) and (catalogue.allow_hub or bool(catalogue.controlnets.offered(card)))
