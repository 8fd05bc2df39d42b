"""The form's controls, in groups that follow the model: controls that a model cannot use are hidden."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.hosting.catalogue.offered import MAX_LORAS
from fastdiff.kinds import MAX_SEED
from fastdiff.requests.completion import random_seed
from fastdiff.requests.defaults import CLIP_SKIP, PRECISION, SCHEDULER
from fastdiff.requests.file_option import FileOption, weight_of
from fastdiff.sampler_names import ETAS, SCHEDULERS
from fastdiff.ui.parts.request import RANDOM, Limits
from fastdiff.ui.queueing.messages import PROBLEMS
from fastdiff.ui.queueing.running import QUICK, Updates

MAX_STEPS = 150  # of the slider, as in A1111; the field beside it takes more
MAX_GUIDANCE = 10  # of the slider; a restored picture can have more
MAX_TEXT_GUIDANCE = 20  # Stable Diffusion is used with 5 to 15
MAX_WEIGHT = 2.0  # of a LoRA's slider; a restored picture can have more
WEIGHT = 1.0  # of a LoRA that was just picked
ASPECTS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16))  # of the preset sizes, width to height
Properties = dict[str, dict[str, Any]]  # properties of a Controls' components, by name


def model_picker(catalogue: Catalogue, card: ModelCard) -> gr.Dropdown:
    hint = "Choose from the list, or enter a hub id (org/name)" if catalogue.allow_hub else None
    return gr.Dropdown(
        catalogue.names(), value=card.name, label="Model", info=hint, allow_custom_value=catalogue.allow_hub
    )


def can_guide(card: ModelCard) -> bool:
    return card.reads_text or (bool(card.labels) and card.info.null_label is not None)


def _guidance_info(card: ModelCard) -> str:
    if card.reads_captions:
        return "How closely to follow the prompt; 0 turns guidance off, and Turbo wants 0 and 8 or 9 steps"
    return f"How closely to follow the {'prompt' if card.reads_text else 'label'}; 1 turns guidance off"


def are_alike(a: ModelCard, b: ModelCard) -> bool:
    """Return whether two models draw from the same labels, or both from prompts."""
    if a.reads_text or b.reads_text:
        return a.reads_text and b.reads_text
    return bool(a.labels) and [*map(a.label_name, a.labels)] == [*map(b.label_name, b.labels)]


class Controls:
    """Base class of a dataclass of components that follow the model together."""

    @property
    def components(self) -> list[Component]:
        return list(vars(self).values())

    def updates(self, properties: Properties) -> Updates:
        return {getattr(self, name): gr.update(**each) for name, each in properties.items()}


@dataclass(frozen=True)
class SamplingControls(Controls):
    """The sampling options: steps, scheduler, eta, guidance, clip skip and weights."""

    steps: gr.Number
    steps_slider: gr.Slider  # follows `steps`, and moves it
    scheduler: gr.Dropdown
    eta: gr.Slider
    guidance_scale: gr.Slider
    clip_skip: gr.Slider
    precision: gr.Radio | gr.Dropdown

    @classmethod
    def build(
        cls,
        catalogue: Catalogue,
        card: ModelCard,
        limits: Limits,
        record: Mapping[str, Any] | None = None,
        picker: type[gr.Radio] | type[gr.Dropdown] = gr.Radio,
    ) -> "SamplingControls":
        """Build the controls. picker: the component type for the weights."""
        properties = cls.properties(catalogue, card, limits, record)
        with gr.Group(elem_classes="steps"):
            steps = gr.Number(
                label="Steps", info="More steps are slower, but finer", min_width=140, **properties["steps"]
            )
            slider = gr.Slider(
                1,
                value=min(MAX_STEPS, properties["steps"]["value"]),
                step=1,
                label="Steps",
                show_label=False,
                min_width=140,
                **properties["steps_slider"],
            )
        sampling = cls(
            steps=steps,
            steps_slider=slider,
            scheduler=gr.Dropdown(
                [(name.upper(), name) for name in SCHEDULERS],
                label="Scheduler",
                info="Sampling method",
                min_width=140,
                **properties["scheduler"],
            ),
            eta=gr.Slider(0, 1, step=0.05, label="Eta", info="Noise per step", min_width=140, **properties["eta"]),
            guidance_scale=gr.Slider(
                0,
                step=0.1,
                label="Guidance",
                min_width=140,
                **properties["guidance_scale"],
            ),
            clip_skip=gr.Slider(
                0,
                step=1,
                label="Clip skip",
                info="How many of the last text encoder layers to skip",
                **properties["clip_skip"],
            ),
            precision=picker(
                [("Full", PRECISION), ("int8", "int8"), ("fp8", "fp8")],
                label="Weights",
                info="int8 and fp8 halve the memory, with a small error; fp8 also multiplies in 8 bits",
                min_width=140,
                **properties["precision"],
            ),
        )
        slider.input(None, slider, steps, js="(count) => count", **QUICK)
        steps.change(None, steps, slider, js=f"(count) => Math.min(count, {MAX_STEPS})", **QUICK)
        sampling.scheduler.change(
            lambda scheduler: gr.update(visible=scheduler in ETAS),
            sampling.scheduler,
            sampling.eta,
            **QUICK,
        )
        return sampling

    @staticmethod
    def properties(
        catalogue: Catalogue, card: ModelCard, limits: Limits, record: Mapping[str, Any] | None = None
    ) -> Properties:
        """Return the properties for `card`, with the values of a picture's `record` or the model's defaults."""
        own = catalogue.default_sampling(card)
        chosen: dict[str, Any] = {
            "num_inference_steps": own.num_inference_steps,
            "scheduler": own.scheduler or SCHEDULER,
            "eta": catalogue.default_sampling(card, "ddim").eta,
            "guidance_scale": own.guidance_scale,
            "clip_skip": CLIP_SKIP,
            "precision": PRECISION,
        }
        chosen |= {key: value for key, value in (record or {}).items() if value is not None}
        most = min(limits.steps, card.num_train_timesteps)
        return {
            "steps": {"value": min(chosen["num_inference_steps"], most)},
            "steps_slider": {"maximum": min(MAX_STEPS, most)},
            "scheduler": {"value": chosen["scheduler"]},
            "eta": {"value": chosen["eta"], "visible": chosen["scheduler"] in ETAS},
            "guidance_scale": {
                "maximum": max(MAX_TEXT_GUIDANCE if card.reads_text else MAX_GUIDANCE, chosen["guidance_scale"]),
                "value": chosen["guidance_scale"],
                "info": _guidance_info(card),
                "visible": can_guide(card),
            },
            "clip_skip": {
                "maximum": max(1, card.most_clip_skip),
                "value": min(chosen["clip_skip"], max(0, card.most_clip_skip)),
                "visible": card.reads_text and card.most_clip_skip > 0,
            },
            "precision": {"value": chosen["precision"]},
        }

    def fit(
        self, catalogue: Catalogue, cards: tuple[ModelCard, ModelCard], limits: Limits, data: Mapping[Component, Any]
    ) -> Updates:
        """Fit the controls to `cards[1]`: its defaults, except where the user changed a default of `cards[0]`."""
        before, card = cards
        defaults = self.properties(catalogue, before, limits)
        values = {name: data[getattr(self, name)] for name, each in defaults.items() if "value" in each}
        changed = {name: value for name, value in values.items() if value != defaults[name]["value"]}
        if "steps" in changed:
            changed["num_inference_steps"] = changed.pop("steps")
        return self.updates(self.properties(catalogue, card, limits, changed))

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of these controls. Options that the model does not have are None."""
        return {
            "steps": data[self.steps],
            "scheduler": data[self.scheduler],
            "eta": data[self.eta] if data[self.scheduler] in ETAS else None,
            "guidance_scale": data[self.guidance_scale] if can_guide(card) else None,
            "clip_skip": data[self.clip_skip] if card.reads_text else None,
            "precision": data[self.precision],
        }


@dataclass(frozen=True)
class SizeControls(Controls):
    """Width and height, in multiples that the model can draw, and preset sizes for a model that reads text."""

    shape: gr.Radio | gr.Dropdown
    width: gr.Slider
    height: gr.Slider

    @classmethod
    def build(
        cls, card: ModelCard, limits: Limits, picker: type[gr.Radio] | type[gr.Dropdown] = gr.Radio
    ) -> "SizeControls":
        """Build the controls in a row. picker: the component type for the preset sizes; a Radio gets its own line."""
        properties = cls.properties(card, limits)
        size = cls(
            shape=picker(label="Size", min_width=320 if picker is gr.Radio else 140, **properties["shape"]),
            width=gr.Slider(label="Width", min_width=140, **properties["width"]),
            height=gr.Slider(label="Height", min_width=140, **properties["height"]),
        )
        sides = [size.width, size.height]
        size.shape.input(lambda text: [int(side) for side in text.split("x")], size.shape, sides, **QUICK)
        gr.on([side.input for side in sides], lambda: None, None, size.shape, **QUICK)  # deselect the preset
        return size

    @staticmethod
    def properties(card: ModelCard, limits: Limits, record: Mapping[str, Any] | None = None) -> Properties:
        """Return the properties for `card`, with the size of a picture's `record` or the model's training size."""
        multiple = card.size_factor
        width, height = card.size or (8 * multiple, 8 * multiple)
        width, height = (record or {}).get("width", width), (record or {}).get("height", height)
        shared = {
            "minimum": multiple,
            "maximum": limits.side // multiple * multiple,
            "step": multiple,
            "info": f"Trained at {card.size[0]}x{card.size[1]}; other sizes may look worse" if card.size else None,
        }
        shapes = [_shape(*each) for each in shapes_of(card, limits)] if card.reads_text else []
        chosen = _shape(width, height)
        shape = {"choices": shapes, "value": chosen if chosen in shapes else None, "visible": len(shapes) > 1}
        return {"shape": shape, "width": {"value": width, **shared}, "height": {"value": height, **shared}}


def shapes_of(card: ModelCard, limits: Limits) -> list[tuple[int, int]]:
    """Return the preset (width, height): the model's own, then others of about as many pixels within `limits`."""
    if card.size is None:
        return []
    pixels, multiple = math.prod(card.size), card.size_factor
    shapes = [card.size]
    for width, height in ASPECTS:
        longest = min(math.sqrt(pixels * max(width, height) / min(width, height)), limits.side // multiple * multiple)
        sides = (round(longest * side / max(width, height) / multiple) * multiple for side in (width, height))
        shapes.append((next(sides), next(sides)))
    return list(dict.fromkeys(shapes))


def _shape(width: int, height: int) -> str:
    return f"{width}x{height}"


_SEED_BUTTONS = """
<button type="button" data-name="dice" title="A random seed for each run" aria-label="A random seed for each run">
    <svg viewBox="0 0 24 24" aria-hidden="true"><rect x="3" y="3" width="18" height="18" rx="4" />
    <path d="M8 8h.01M16 8h.01M12 12h.01M8 16h.01M16 16h.01" /></svg></button>
<button type="button" data-name="lock" title="Keep the picture's seed" aria-label="Keep the picture's seed">
    <svg viewBox="0 0 24 24" aria-hidden="true"><rect x="5" y="11" width="14" height="10" rx="2" />
    <path d="M8 11V7a4 4 0 0 1 8 0v4M12 15v2" /></svg></button>
"""
_PRESS = """
element.addEventListener("click", ({target}) => {
    const button = target.closest("button");
    if (button) trigger("click", {name: button.dataset.name});
});"""


@dataclass(frozen=True)
class SeedField(Controls):
    """The seed of a run. If it is -1 or empty, each run has a random one.

    A die sets it to -1. A lock fills in the seed of the picture on the page, so that the next run has it too.
    """

    seed: gr.Number
    buttons: gr.HTML

    @classmethod
    def build(cls) -> "SeedField":
        with gr.Group(elem_classes="seed"):
            return cls(
                gr.Number(RANDOM, label="Seed", info=f"0 to {MAX_SEED}; {RANDOM} or empty is random"),
                gr.HTML(_SEED_BUTTONS, js_on_load=_PRESS, apply_default_css=False, padding=False),
            )

    def connect(self, inputs: Sequence[gr.State], seed_of: Callable[..., int | None]) -> None:
        """Connect the buttons. seed_of: returns the seed of the picture on the page, if there is one."""

        def press(event: gr.EventData, *values: Any) -> int:
            if getattr(event, "name", None) == "dice":
                return RANDOM
            seed = seed_of(*values)
            return random_seed(1) if seed is None else seed

        self.buttons.click(press, [*inputs], self.seed, **QUICK)


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
