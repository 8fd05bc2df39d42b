"""The form of the page: a subject and a seed, with one model and its settings in Draw, and two in Compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.requests.file_option import FileOption
from fastdiff.requests.request import AXES
from fastdiff.ui.inputs.axes import Axes
from fastdiff.ui.inputs.uploaded import uploaded_path
from fastdiff.ui.parts.axis_fields import AxisFields
from fastdiff.ui.parts.control_fields import ControlSection
from fastdiff.ui.parts.controls import (
    LoraControls,
    SamplingControls,
    SeedField,
    SizeControls,
    are_alike,
    model_picker,
)
from fastdiff.ui.parts.draw_fields import EDITOR, PromptingControls, StartControls, UpscaleControls
from fastdiff.ui.parts.ip_adapter_fields import IPAdapterSection
from fastdiff.ui.parts.picture_section import PictureSection
from fastdiff.ui.parts.request import RANDOM, Limits, UncheckedRequest
from fastdiff.ui.parts.subject import LabelPickers, PromptBoxes
from fastdiff.ui.queueing.running import Updates


@dataclass(frozen=True)
class ModelControls:
    """A model and its sampling and size controls."""

    catalogue: Catalogue
    limits: Limits
    model: gr.Dropdown
    fitted: gr.State  # the name of the model that the controls currently fit
    sampling: SamplingControls
    size: SizeControls
    loras: LoraControls

    @classmethod
    def build(cls, name: str, catalogue: Catalogue, card: ModelCard, limits: Limits, steps: int) -> "ModelControls":
        """Build a side of Compare in one row, with its `name` as heading. steps: the initial number of steps."""
        with gr.Row(elem_classes="side"):
            gr.Markdown(f"### {name}")
            model = model_picker(catalogue, card)
            sampling = SamplingControls.build(catalogue, card, limits, {"num_inference_steps": steps}, gr.Dropdown)
            size = SizeControls.build(card, limits, gr.Dropdown)
            loras = LoraControls.build(catalogue, card)
            return cls(catalogue, limits, model, gr.State(card.name), sampling, size, loras)

    @property
    def components(self) -> list[Component]:
        groups = (self.sampling, self.size, self.loras)
        return [self.model, self.fitted, *(component for group in groups for component in group.components)]

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of these controls."""
        size = {"width": data[self.size.width], "height": data[self.size.height]}
        return {"model": card.name, **self.sampling.chosen(data, card), **size, **self.loras.chosen(data, card)}

    def fit(self, cards: tuple[ModelCard, ModelCard], data: Mapping[Component, Any]) -> Updates:
        """Fit the controls to `cards[1]`; they fit `cards[0]` now."""
        return {
            self.fitted: cards[1].name,
            **self.sampling.fit(self.catalogue, cards, self.limits, data),
            **self.size.updates(SizeControls.properties(cards[1], self.limits)),
            **self.loras.fit(self.catalogue, cards[1], data),
        }

    def show(self, card: ModelCard, record: Mapping[str, Any]) -> Updates:
        """Fit the controls to `card`, and fill in the settings of a picture's `record`."""
        return {
            self.model: card.name,
            self.fitted: card.name,
            **self.sampling.updates(SamplingControls.properties(self.catalogue, card, self.limits, record)),
            **self.size.updates(SizeControls.properties(card, self.limits, record)),
            **self.loras.show(self.catalogue, card, record.get("lora") or ()),
        }


@dataclass(frozen=True)
class Form:
    """The fields that Draw and Compare share. Draw has one side, Compare has A and B."""

    catalogue: Catalogue
    limits: Limits
    labels: LabelPickers
    boxes: PromptBoxes
    seeds: SeedField
    sides: Sequence[ModelControls]

    @classmethod
    def build(cls, catalogue: Catalogue, card: ModelCard, limits: Limits) -> "Form":
        """Build the form of Compare. B opens with half the steps of A."""
        labels = LabelPickers.build(card)
        boxes = PromptBoxes.build(catalogue, card)
        seeds = SeedField.build()
        steps = catalogue.default_sampling(card).num_inference_steps
        sides = [
            ModelControls.build(name, catalogue, card, limits, count)
            for name, count in (("A", steps), ("B", max(1, steps // 2)))
        ]
        return cls(catalogue, limits, labels, boxes, seeds, sides)

    @property
    def seed(self) -> gr.Number:
        return self.seeds.seed

    @property
    def components(self) -> list[Component]:
        sides = [component for side in self.sides for component in side.components]
        return [*self.labels.components, *self.boxes.components, self.seed, *sides]

    @property
    def typed(self) -> list[gr.Textbox | gr.Number]:
        """The fields in which Enter starts a run. In a prompt, Enter begins a line."""
        return [self.seed]

    def follow(self) -> None:
        """Update the label groups when the style changes, and the token counts when a text, a style or a model does."""
        pickers = [side.model for side in self.sides]
        self.labels.follow(self.catalogue, pickers[0])
        self.boxes.follow(self.catalogue, pickers, self.syntax)
        for side in self.sides:
            side.loras.follow(self.catalogue, side.model)

    @property
    def syntax(self) -> gr.Dropdown | None:
        """The field of the prompt syntax; None: prompts are plain."""
        return None

    def request(self, data: Mapping[Component, Any], side: int = 0) -> UncheckedRequest:
        """Return the request of one side. Raises InputError for an unknown model."""
        card = self.catalogue.card(data[self.sides[side].model])
        return UncheckedRequest(
            label=self.labels.chosen(data) if card.labels else None,
            seed=data[self.seed],
            **self.boxes.chosen(self.catalogue, data, card),
            **self.sides[side].chosen(data, card),
        )

    def fit(self, data: Mapping[Component, Any], side: int = 0) -> Updates | None:
        """Fit the form to the model chosen in a side. Returns None if it already fits.

        The labels follow the model of the first side; the prompts follow the models of all sides. Gradio also sends an
        event when a user focuses the field and leaves it, with the same model. Raises InputError for an unknown model.
        """
        controls = self.sides[side]
        name, before = data[controls.model], data[controls.fitted]
        if name == before:
            return None
        cards = self.catalogue.card(before), self.catalogue.card(name)
        chosen = [self.catalogue.card(data[each.model]) for each in self.sides]
        updates = self.boxes.fit(self.catalogue, chosen, data) | controls.fit(cards, data)
        return updates if side else updates | self.labels.fit(cards[1], data)

    def show(self, card: ModelCard, record: Mapping[str, Any]) -> Updates:
        """Fit the form and each side to `card`, and fill in the settings of a picture's `record`."""
        return {
            self.seed: record.get("seed", RANDOM),
            **self.labels.updates(LabelPickers.properties(card, record["label"])),
            **self.boxes.updates(PromptBoxes.properties(self.catalogue, [card], record)),
            **{field: update for side in self.sides for field, update in side.show(card, record).items()},
        }


@dataclass(frozen=True)
class DrawForm(Form):
    """The form of Draw, which adds several pictures with consecutive seeds, and X/Y sheets."""

    num_images: gr.Slider
    batch_size: gr.Slider
    axes: AxisFields
    start: StartControls
    prompting: PromptingControls
    enlarging: UpscaleControls
    control: ControlSection
    ip_adapter: IPAdapterSection

    @classmethod
    def build(cls, catalogue: Catalogue, card: ModelCard, limits: Limits) -> "DrawForm":
        model = model_picker(catalogue, card)
        labels = LabelPickers.build(card)
        boxes = PromptBoxes.build(catalogue, card)
        loras = LoraControls.build(catalogue, card)
        own = catalogue.defaults
        num_images = gr.Slider(
            1, limits.pictures, value=own.pictures, step=1, label="Pictures", info="How many; seeds count up"
        )
        seeds = SeedField.build()
        start = StartControls.build(card)
        sections = ControlSection.build(catalogue, card), IPAdapterSection.build(catalogue, card)
        with gr.Accordion("More settings", open=False, elem_id="more"):
            sampling = SamplingControls.build(catalogue, card, limits)
            prompting = PromptingControls.build(card)
            with gr.Row(elem_classes="size"):
                size = SizeControls.build(card, limits)
            enlarging = UpscaleControls.build(card)
            batch_size = gr.Slider(
                1,
                limits.batch_size,
                value=own.batch_size,
                step=1,
                label="Batch size",
                info="Pictures computed together; smaller batches need less memory",
            )
        axes = AxisFields.build(card)
        side = ModelControls(catalogue, limits, model, gr.State(card.name), sampling, size, loras)
        own_fields = (num_images, batch_size, axes, start, prompting, enlarging, *sections)
        return cls(catalogue, limits, labels, boxes, seeds, [side], *own_fields)

    @property
    def sections(self) -> tuple[PictureSection, ...]:
        """The sections of networks that read a picture."""
        return self.control, self.ip_adapter

    @property
    def model(self) -> gr.Dropdown:
        return self.sides[0].model

    @property
    def syntax(self) -> gr.Dropdown:
        return self.prompting.prompt_syntax

    @property
    def components(self) -> list[Component]:
        """The fields, in the order in which the browser stores their values."""
        (side,) = self.sides
        groups = (self.labels, self.boxes, side.loras, side.sampling, side.size, self.axes)
        own = (self.start, self.prompting, self.enlarging, self.control, self.ip_adapter)
        single = [side.model, side.fitted, self.num_images, self.seed, self.batch_size]
        return single + [component for group in (*groups, *own) for component in group.components]

    def request(self, data: Mapping[Component, Any], side: int = 0) -> UncheckedRequest:
        card = self.catalogue.card(data[self.model])
        counts = {"num_images": data[self.num_images], "batch_size": data[self.batch_size]}
        own = self.start.chosen(data, card) | self.prompting.chosen(data, card)
        own |= self.enlarging.chosen(data, card)
        for section in self.sections:
            own |= section.chosen(data, card)
        return replace(super().request(data, side), **counts, **own)

    def fit(self, data: Mapping[Component, Any], side: int = 0) -> Updates | None:
        updates = super().fit(data, side)
        if updates is None:
            return None
        before, card = (self.catalogue.card(data[each]) for each in (self.sides[side].fitted, self.model))
        updates |= self.start.fit((before, card), data) | self.prompting.fit(card, data)
        updates |= self.enlarging.fit(card, data)
        for section in self.sections:
            updates |= section.fit(card, data)
        return updates | self.axes.fit(card, data, keep_label=are_alike(before, card))

    def show(self, card: ModelCard, record: Mapping[str, Any]) -> Updates:
        return {
            **super().show(card, record),
            self.num_images: record.get("num_images", 1),
            **self.axes.show(card, record.get(AXES, Axes())),
            **self.start.show(card, record),
            **self.prompting.updates(PromptingControls.properties(card, record)),
            **self.enlarging.updates(UpscaleControls.properties(card, record)),
            **{field: each for section in self.sections for field, each in section.show(card, record).items()},
        }

    def known_files(self, request: UncheckedRequest) -> UncheckedRequest:
        """Return a request without files that are not on offer any more, and without pictures that are gone."""
        card = self.catalogue.card(request.model)
        offered = self.catalogue.option_files.loras(card)
        kept = [text for text in request.lora or () if FileOption.parse(text).path in offered]
        request = replace(request, lora=kept or None)
        if not _is_there(request.init_image):
            request = replace(request, init_image=None, strength=None, mask=None, mask_blur=None)
        for section in self.sections:
            name, image = section.readers.SETTING, f"{section.readers.SETTING}_image"
            is_offered = getattr(request, name) in section.readers.offered(card)
            if not is_offered or not _is_there(getattr(request, image)):
                request = replace(request, **dict.fromkeys(vars(section.fields)))
        return request

    def follow(self) -> None:
        super().follow()
        for section in self.sections:
            section.follow(self.catalogue, self.model)

    def show_request(self, card: ModelCard, request: UncheckedRequest, editor: str | None = None) -> Updates:
        """Fit the form to `card`, and fill in a valid request. A label that is not on offer becomes the first one.

        editor: of the request's mask.
        """
        label = request.label if LabelPickers.offers(card, request.label) else None
        chosen = {name: value for name, value in vars(request).items() if value is not None}
        return self.show(card, chosen | {"num_inference_steps": request.steps, "label": label, EDITOR: editor})


def _is_there(upload: Any) -> bool:
    try:
        uploaded_path(upload)
    except InputError:
        return False
    return True
