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
from fastdiff.ui.tabs.controls import Sampling, SeedField, Size, Subject, Updates, model_picker
from fastdiff.ui.tabs.examples import Example
from fastdiff.ui.tabs.prompt import PromptBoxes


@dataclass(frozen=True)
class Form:
    models: Models
    limits: Limits
    model: gr.Dropdown
    fitted: gr.State  # the name of the model that the form fits
    subject: Subject
    boxes: PromptBoxes
    num_images: gr.Slider
    seed: SeedField
    sampling: Sampling
    size: Size
    batch_size: gr.Slider

    @classmethod
    def build(cls, models: Models, card: ModelCard, limits: Limits) -> "Form":
        model = model_picker(models, card)
        subject = Subject.build(card)
        boxes = PromptBoxes.build(models, card)
        num_images = gr.Slider(
            1, limits.pictures, value=models.defaults.pictures, step=1, label="Pictures", info="Each has the next seed"
        )
        seed = SeedField.build()
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
        return cls(
            models, limits, model, gr.State(card.name), subject, boxes, num_images, seed, sampling, size, batch_size
        )

    @property
    def components(self) -> list[Component]:
        groups = (self.subject, self.boxes, self.seed, self.sampling, self.size)
        single = [self.model, self.fitted, self.num_images, self.batch_size]
        return single + [component for group in groups for component in group.components]

    @property
    def typed(self) -> list[gr.Textbox | gr.Number]:
        """The fields in which Enter draws."""
        return [self.boxes.prompt, self.boxes.negative_prompt, self.seed.seed]

    def options(self, data: Mapping[Component, Any]) -> Options:
        """The options that the form asks for. InputError for a model that is not there."""
        card = self.models.card(data[self.model])
        return Options(
            model=data[self.model],
            label=self.subject.chosen(data),
            seed=data[self.seed.seed],
            num_images=data[self.num_images],
            width=data[self.size.width],
            height=data[self.size.height],
            batch_size=data[self.batch_size],
            **self.boxes.chosen(data, card),
            **self.sampling.chosen(data, card),
        )

    def fit(self, data: Mapping[Component, Any]) -> Updates | None:
        """The form for the model in it; None where it fits already. InputError for a model that is not there.

        Who touches the field and leaves it has chosen the same model again, as Gradio sees it.
        """
        name, before = data[self.model], data[self.fitted]
        if name == before:
            return None
        cards = self.models.card(before), self.models.card(name)
        return {
            self.fitted: name,
            **self.subject.fit(cards[1], data),
            **self.boxes.fit(self.models, cards[1:], data),
            **self.sampling.fit(self.models, cards, self.limits, data),
            **self.size.updates(Size.properties(cards[1], self.limits)),
        }

    def show_example(self, card: ModelCard, example: Example) -> Updates:
        """The form with another subject and seed. InputError for files that make no tokenizer."""
        updates = self.seed.show(example.seed)
        if card.reads_text:
            return updates | self.boxes.updates(
                PromptBoxes.properties(self.models, [card], {"prompt": example.subject})
            )
        return updates | self.subject.updates(Subject.properties(card, example.subject))

    def show(self, card: ModelCard, record: Mapping[str, Any]) -> Updates:
        """The form for `card` with the settings in a picture's `record`."""
        return {
            self.model: card.name,
            self.fitted: card.name,
            self.num_images: 1,
            **self.seed.show(record["seed"]),
            **self.subject.updates(Subject.properties(card, record["label"])),
            **self.boxes.updates(PromptBoxes.properties(self.models, [card], record)),
            **self.sampling.updates(Sampling.properties(self.models, card, self.limits, record)),
            **self.size.updates(Size.properties(card, self.limits, record)),
        }
