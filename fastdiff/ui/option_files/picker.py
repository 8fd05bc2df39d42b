"""The list of LoRAs in the form, with a slider for the weight of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.requests.file_option import FileOption, weight_of
from fastdiff.ui.option_files.offered import MAX_LORAS
from fastdiff.ui.parts.catalogue import Catalogue
from fastdiff.ui.parts.messages import PROBLEMS
from fastdiff.ui.parts.running import QUICK, Updates

MAX_WEIGHT = 2.0  # of a LoRA's slider; a restored picture can have more
WEIGHT = 1.0  # of a LoRA that was just picked


@dataclass(frozen=True)
class LoraControls:
    """The picker, and as many sliders as LoRAs can be picked. Those without a LoRA are hidden."""

    picker: gr.Dropdown
    names: gr.State  # of the LoRAs whose weights the sliders have; the picker is ahead until the sliders follow
    sliders: tuple[gr.Slider, ...]

    @classmethod
    def build(cls, catalogue: Catalogue, card: ModelCard) -> "LoraControls":
        offered = [*catalogue.option_files.loras(card)]
        picker = gr.Dropdown(
            offered,
            value=[],
            multiselect=True,
            max_choices=MAX_LORAS,
            label="LoRAs",
            min_width=140,
            visible=bool(offered),
        )
        sliders = tuple(
            gr.Slider(-MAX_WEIGHT, MAX_WEIGHT, value=WEIGHT, step=0.05, label="Weight", min_width=140, visible=False)
            for _ in range(MAX_LORAS)
        )
        return cls(picker, gr.State([]), sliders)

    @property
    def components(self) -> list[Component]:
        return [self.picker, self.names, *self.sliders]

    def weights(self, data: Mapping[Component, Any]) -> dict[str, Any]:
        """Return the weight of each LoRA that is picked, in order."""
        picked = data[self.picker] if isinstance(data[self.picker], list) else []
        names = picked if data[self.names] is None else data[self.names]  # the browser does not store a State
        there = dict(zip(names, (data[slider] for slider in self.sliders), strict=False))
        return {name: there.get(name, WEIGHT) for name in picked}

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest field of these controls, or none for a model without prompts."""
        weights = self.weights(data) if card.reads_text else {}
        return {"lora": [f"{name}:{weight:g}" for name, weight in weights.items()]} if weights else {}

    def show(self, catalogue: Catalogue, card: ModelCard, chosen: Sequence[str]) -> Updates:
        """Fit the controls to a model, and fill in LoRAs, each as NAME or NAME:WEIGHT."""
        options = map(FileOption.parse, chosen)
        return self._fill(catalogue, card, {option.path: weight_of(option) for option in options})

    def fit(self, catalogue: Catalogue, card: ModelCard, data: Mapping[Component, Any]) -> Updates:
        """Fit the controls to another model. The LoRAs that fit it stay."""
        return self._fill(catalogue, card, self.weights(data))

    def _fill(self, catalogue: Catalogue, card: ModelCard, weights: Mapping[str, Any]) -> Updates:
        offered = [*catalogue.option_files.loras(card)]
        kept = {name: weight for name, weight in weights.items() if name in offered}
        picker = gr.update(choices=offered, value=[*kept], visible=bool(offered))
        return {self.picker: picker, **self._moved(kept)}

    def _moved(self, weights: Mapping[str, Any]) -> Updates:
        """Return the updates of the sliders."""
        updates: Updates = {self.names: [*weights]}
        for i, slider in enumerate(self.sliders):
            updates[slider] = gr.update(visible=False, value=WEIGHT)
            if i < len(weights):
                name, weight = [*weights.items()][i]
                most = max(MAX_WEIGHT, abs(weight))
                label = name.rpartition(".")[0]
                updates[slider] = gr.update(visible=True, value=weight, label=label, minimum=-most, maximum=most)
        return updates

    def follow(self, catalogue: Catalogue, model: gr.Dropdown) -> None:
        """Give each LoRA that is picked its slider. List the files of the folder again when the list is opened."""

        def move(data: Mapping[Component, Any]) -> Updates:
            weights = self.weights(data)
            is_known = [*weights] == data[self.names]  # a picture has filled in the sliders too
            return {self.names: gr.skip()} if is_known else self._moved(weights)

        def offer(name: str) -> dict[str, Any]:
            try:
                return gr.update(choices=[*catalogue.option_files.loras(catalogue.card(name))])
            except PROBLEMS:  # the model no longer exists
                return gr.skip()

        self.picker.change(move, {*self.components}, [self.names, *self.sliders], **QUICK)
        self.picker.focus(offer, model, self.picker, **QUICK)
