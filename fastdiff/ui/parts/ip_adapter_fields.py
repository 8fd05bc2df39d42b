"""The fields of the IP-Adapter, which only Draw has: its picture, and how much it counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from fastdiff.checkpoints.model_card import ModelCard
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

_DEFAULTS: dict[str, Any] = {"ip_adapter": NONE, "ip_adapter_image": None, "ip_adapter_scale": 1}


@dataclass(frozen=True)
class IPAdapterFields(PictureFields):
    """The fields inside an `IPAdapterSection`."""

    ip_adapter: gr.Dropdown
    ip_adapter_image: gr.Image
    ip_adapter_scale: gr.Slider

    @property
    def name(self) -> gr.Dropdown:
        return self.ip_adapter

    @property
    def image(self) -> gr.Image:
        return self.ip_adapter_image

    @staticmethod
    def properties(record: Mapping[str, Any]) -> Properties:
        values = kept_values(record, _DEFAULTS, "ip_adapter_image")
        found: Properties = {name: {"value": value} for name, value in values.items()}
        found["ip_adapter_scale"] |= slider_range(0, MAX_SCALE, values["ip_adapter_scale"])
        return found


@dataclass(frozen=True)
class IPAdapterSection(PictureSection):
    """The section of the IP-Adapter."""

    fields: IPAdapterFields

    @classmethod
    def build(cls, catalogue: Catalogue, card: ModelCard) -> "IPAdapterSection":
        adapters, names = catalogue.ip_adapters, [*catalogue.ip_adapters.offered(card)]
        visible = is_shown(adapters, card, names)
        with gr.Accordion("IP-Adapter", open=False, visible=visible, elem_id="ip-adapter") as box:
            adapter = network_list(adapters, names, "The model reads a picture beside the prompt")
            picture = picture_field("Image prompt", "image-prompt")
            scale = gr.Slider(
                label="IP-Adapter scale",
                info="How much the picture counts",
                step=0.05,
                min_width=140,
                **IPAdapterFields.properties({})["ip_adapter_scale"],
            )
        return cls(adapters, box, IPAdapterFields(adapter, picture, scale))
