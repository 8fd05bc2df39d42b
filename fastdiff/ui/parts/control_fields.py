"""The fields of the ControlNet, which only Draw has: its picture, what is made of it, and how much it counts."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.edges import HIGH, LOW
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.ui.parts.controls import Properties
from fastdiff.ui.parts.picture_section import (
    MAX_SCALE,
    NONE,
    PictureFields,
    PictureSection,
    is_shown,
    kept_values,
    network_list,
    picture_field,
    slider_range,
)
from fastdiff.ui.parts.request import CANNY, PREPROCESSOR
from fastdiff.ui.queueing.running import QUICK

MAX_THRESHOLD = 500  # of the sliders; a restored request of the API can have more
_DEFAULTS: dict[str, Any] = {
    "control": NONE,
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
class ControlFields(PictureFields):
    """The fields inside a `ControlSection`."""

    control: gr.Dropdown
    control_image: gr.Image
    control_preprocessor: gr.Radio
    canny_low: gr.Slider
    canny_high: gr.Slider
    control_scale: gr.Slider
    control_start: gr.Slider
    control_end: gr.Slider
    guess_mode: gr.Checkbox

    @property
    def name(self) -> gr.Dropdown:
        return self.control

    @property
    def image(self) -> gr.Image:
        return self.control_image

    @staticmethod
    def properties(record: Mapping[str, Any]) -> Properties:
        """Return the properties with the values of a request or a picture. Its picture counts as it is."""
        plain = {"control_preprocessor": PREPROCESSOR} if record.get("control_image") is not None else {}
        values = kept_values(record, _DEFAULTS | plain, "control_image")
        found: Properties = {name: {"value": value} for name, value in values.items()}
        found["control_scale"] |= slider_range(0, MAX_SCALE, values["control_scale"])
        for name in ("canny_low", "canny_high"):
            found[name] |= {"visible": values["control_preprocessor"] == CANNY}
            found[name] |= slider_range(0, MAX_THRESHOLD, values[name])
        return found


@dataclass(frozen=True)
class ControlSection(PictureSection):
    """The section of the ControlNet."""

    fields: ControlFields
    preview: gr.HTML  # the control picture that is made

    @classmethod
    def build(cls, catalogue: Catalogue, card: ModelCard) -> "ControlSection":
        nets, names = catalogue.controlnets, [*catalogue.controlnets.offered(card)]
        with gr.Accordion("ControlNet", open=False, visible=is_shown(nets, card, names), elem_id="control") as box:
            properties = ControlFields.properties({})
            net = network_list(nets, names, "The result follows a picture")
            picture = picture_field("Control picture", "control-picture")
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
        return cls(nets, box, fields, preview)

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        values = super().chosen(data, card)
        if values and values["control_preprocessor"] != CANNY:
            values |= {"canny_low": None, "canny_high": None}
        return values


def preview_html(path: Path) -> str:
    """Return the HTML of a control picture that was made from another picture."""
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return (
        f'<figure><img alt="Control picture with edges" src="{url}"><figcaption>Control picture</figcaption></figure>'
    )
