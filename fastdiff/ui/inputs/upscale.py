"""The fields that enlarge a picture: by how much, and how much of it changes. 1 enlarges nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.requests.defaults import UPSCALE_MODE, UPSCALE_STRENGTH
from fastdiff.ui.parts.controls import Controls, Properties
from fastdiff.ui.parts.running import QUICK, Updates

MOST = 4  # of the slider; a restored picture can have more


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
        properties["upscale"] |= {"visible": card.reads_text, "maximum": max(MOST, chosen["upscale"])}
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
