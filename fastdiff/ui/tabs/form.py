"""The form of the Draw tab: which model, what it shows, how it is drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models
from fastdiff.ui.options import Options
from fastdiff.ui.tabs.controls import Sampling, Size, Subject, Updates, model_picker, seed_field


@dataclass(frozen=True)
class Form:
    models: Models
    limits: Limits
    model: gr.Dropdown
    subject: Subject
    num_images: gr.Slider
    seed: gr.Number
    sampling: Sampling
    size: Size
    batch_size: gr.Slider

    @classmethod
    def build(cls, models: Models, card: ModelCard, limits: Limits) -> "Form":
        model = model_picker(models, card)
        subject = Subject.build(card)
        num_images = gr.Slider(
            1, limits.pictures, value=models.defaults.pictures, step=1, label="Pictures", info="Each has the next seed"
        )
        seed = seed_field()
        with gr.Accordion("More settings", open=False):
            sampling = Sampling.build(models, card, limits)
            size = Size.build(card, limits)
            batch_size = gr.Slider(
                1,
                limits.batch_size,
                value=models.defaults.batch_size,
                step=1,
                label="Batch size",
                info="Pictures drawn side by side; fewer need less memory",
            )
        return cls(models, limits, model, subject, num_images, seed, sampling, size, batch_size)

    @property
    def components(self) -> list[Component]:
        groups = (self.subject, self.sampling, self.size)
        single = [self.model, self.num_images, self.seed, self.batch_size]
        return single + [component for group in groups for component in group.components]

    def options(self, data: Mapping[Component, Any]) -> Options:
        """The options that the form asks for. InputError for a model that is not there."""
        return Options(
            model=data[self.model],
            label=self.subject.chosen(data),
            seed=data[self.seed],
            num_images=data[self.num_images],
            width=data[self.size.width],
            height=data[self.size.height],
            batch_size=data[self.batch_size],
            **self.sampling.chosen(data, self.models.card(data[self.model])),
        )

    def show(self, card: ModelCard, record: Mapping[str, Any] | None = None) -> Updates:
        """The form for `card`: with its defaults, or with the settings in a picture's `record`."""
        label = record["label"] if record else None
        updates = {
            **self.subject.updates(Subject.properties(card, label)),
            **self.sampling.updates(Sampling.properties(self.models, card, self.limits, record)),
            **self.size.updates(Size.properties(card, self.limits, record)),
        }
        if record:
            updates |= {self.model: card.name, self.seed: record["seed"], self.num_images: 1}
        return updates
