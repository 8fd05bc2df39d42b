"""The form's controls, in groups that follow the model: what a model cannot use is not shown."""

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import SCHEDULERS
from fastdiff.kinds import MAX_SEED
from fastdiff.requests.defaults import PRECISION, SCHEDULER, SEED
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models
from fastdiff.ui.tabs.examples import examples_of
from fastdiff.ui.tabs.running import QUICK, Updates

MAX_GUIDANCE = 10  # of the slider; larger ones can come from a picture
MAX_TEXT_GUIDANCE = 20  # Stable Diffusion is drawn with 5 to 15
ASPECTS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16))  # of the sizes on offer, width to height
Choices = list[tuple[str, str | int]]  # the text of each, and its label or group
Properties = dict[str, dict[str, Any]]  # of the components of a Controls, by name


def model_picker(models: Models, card: ModelCard) -> gr.Dropdown:
    hint = "One of the list, or any hub id org/name" if models.allow_hub else None
    return gr.Dropdown(models.names(), value=card.name, label="Model", info=hint, allow_custom_value=models.allow_hub)


def can_guide(card: ModelCard) -> bool:
    return card.reads_text or (bool(card.labels) and card.info.null_label is not None)


def are_alike(a: ModelCard, b: ModelCard) -> bool:
    """Whether two models draw from the same labels, or both from prompts."""
    if a.reads_text or b.reads_text:
        return a.reads_text and b.reads_text
    return bool(a.labels) and [*map(a.label_name, a.labels)] == [*map(b.label_name, b.labels)]


class Controls:
    """Controls that follow the model together: a dataclass of components."""

    @property
    def components(self) -> list[Component]:
        return list(vars(self).values())

    def updates(self, properties: Properties) -> Updates:
        return {getattr(self, name): gr.update(**each) for name, each in properties.items()}


@dataclass(frozen=True)
class Subject(Controls):
    """The subject of the picture: a style and a group where the labels' names begin with styles, else a label."""

    style: gr.Dropdown
    group: gr.Dropdown
    label: gr.Dropdown

    @classmethod
    def build(cls, card: ModelCard) -> "Subject":
        properties = cls.properties(card)
        with gr.Row():
            return cls(
                style=gr.Dropdown(label="Style", min_width=130, **properties["style"]),
                group=gr.Dropdown(label="Group", min_width=130, **properties["group"]),
                label=gr.Dropdown(label="Label", **properties["label"]),
            )

    @staticmethod
    def offers(card: ModelCard, label: str | int | None) -> bool:
        """Whether `label` can be chosen, or none where there are none."""
        return label in {name for _, name in _choices(card)} if card.labels else label is None

    @staticmethod
    def properties(card: ModelCard, chosen: str | int | None = None) -> Properties:
        """For `card`, with the label or group `chosen`, which it offers, or the first choice."""
        styles = _styles(card)
        names = [name for _, name in _choices(card)]
        chosen = _first_choice(card, names) if chosen is None else chosen
        hidden: dict[str, Any] = {"choices": [], "value": None, "visible": False}
        if not styles:
            label = {"choices": _choices(card), "value": chosen, "visible": bool(names)}
            return {"style": hidden, "group": hidden, "label": label}
        style, group = str(chosen).split(" ", 1)
        return {
            "style": {"choices": styles, "value": style, "visible": True},
            "group": {"choices": _choices(card, style), "value": group, "visible": True},
            "label": hidden,
        }

    def fit(self, card: ModelCard, data: Mapping[Component, Any]) -> Updates:
        """The pickers for another model, with the same label where it has that."""
        label = self.chosen(data)
        return self.updates(self.properties(card, label if self.offers(card, label) else None))

    def follow(self, models: Models, model: gr.Dropdown) -> None:
        """Let the groups follow the style; the same one stays where the style has it."""

        def groups(name: str, style: str, group: str) -> dict[str, Any]:
            choices = _choices(models.card(name), style)
            names = [name for _, name in choices]
            return gr.update(choices=choices, value=group if group in names else names[0])

        inputs = [model, self.style, self.group]
        self.style.input(groups, inputs, self.group, **QUICK)

    def chosen(self, data: Mapping[Component, Any]) -> str | int | None:
        """The label or group that the controls name; None for an unconditional model."""
        style, group = data[self.style], data[self.group]
        return data[self.label] if style is None or group is None else f"{style} {group}"


def _first_choice(card: ModelCard, names: Sequence[str | int]) -> str | int | None:
    """The subject that the form opens with: that of the model's first example, else its first one."""
    examples = [example.subject for example in examples_of(card)]
    return next((name for name in [*examples, *names] if name in names), None)


def _styles(card: ModelCard) -> list[str]:
    """The first words of the labels' names, where each begins several of them and no group mixes them."""
    names = [name for name in map(card.label_name, card.labels) if isinstance(name, str) and " " in name]
    if len(names) < len(card.labels):
        return []
    counts = Counter(_style(name) for name in names)
    groups = card.info.label_groups.items()
    mixed = any(_style(name) != _style(group) for group, members in groups for name in members)
    return [] if mixed or len(counts) < 2 or min(counts.values()) < 2 else list(counts)


def _style(name: str) -> str:
    return name.split(" ", 1)[0]


def _choices(card: ModelCard, style: str | None = None) -> Choices:
    """(text, name) of each group and label, without `style`: each group before the labels in it."""
    start = f"{style} " if style else ""
    groups = {group: members for group, members in card.info.label_groups.items() if group.startswith(start)}
    choices: Choices = []
    for group, members in groups.items():
        short = group.removeprefix(start)
        choices.append((f"{short}: any", short))
        choices += [(f"{short}: {name.removeprefix(start)}", name.removeprefix(start)) for name in members]
    grouped = {name for members in groups.values() for name in members}
    names = [name for name in map(card.info.label_name, card.labels) if name not in grouped]
    if not style:
        return choices + [(str(name), name) for name in names]
    short_names = [str(name).removeprefix(start) for name in names if str(name).startswith(start)]
    return choices + [(short, short) for short in short_names]


@dataclass(frozen=True)
class Sampling(Controls):
    """The options of sampling: steps, scheduler, eta, guidance, the layers of the text encoder, the weights."""

    steps: gr.Slider
    scheduler: gr.Radio | gr.Dropdown
    eta: gr.Slider
    guidance_scale: gr.Slider
    clip_skip: gr.Slider
    precision: gr.Radio | gr.Dropdown

    @classmethod
    def build(
        cls,
        models: Models,
        card: ModelCard,
        limits: Limits,
        record: Mapping[str, Any] | None = None,
        picker: type[gr.Radio] | type[gr.Dropdown] = gr.Radio,
    ) -> "Sampling":
        """`picker` is that of the schedulers and of the weights: all at a glance, or on one line."""
        properties = cls.properties(models, card, limits, record)
        sampling = cls(
            steps=gr.Slider(
                1, step=1, label="Steps", info="More are slower and finer", min_width=140, **properties["steps"]
            ),
            scheduler=picker(
                [(name.upper(), name) for name in SCHEDULERS],
                label="Scheduler",
                info="How noise is removed",
                min_width=140,
                **properties["scheduler"],
            ),
            eta=gr.Slider(0, 1, step=0.05, label="Eta", info="Noise of each step", min_width=140, **properties["eta"]),
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
                info="Last layers of the text encoder that are left out",
                **properties["clip_skip"],
            ),
            precision=picker(
                [("Full", PRECISION), ("int8", "int8"), ("fp8", "fp8")],
                label="Weights",
                info="8 bits take half the memory, for a small error; fp8 multiplies in 8 bits too",
                min_width=140,
                **properties["precision"],
            ),
        )
        sampling.scheduler.change(
            lambda scheduler: gr.update(visible=scheduler == "ddim"),
            sampling.scheduler,
            sampling.eta,
            **QUICK,
        )
        return sampling

    @staticmethod
    def properties(
        models: Models, card: ModelCard, limits: Limits, record: Mapping[str, Any] | None = None
    ) -> Properties:
        """For `card`, with the values of a picture's `record` or the model's defaults."""
        own = models.default_sampling(card)
        chosen: dict[str, Any] = {
            "num_inference_steps": own.num_inference_steps,
            "scheduler": own.scheduler or SCHEDULER,
            "eta": models.default_sampling(card, "ddim").eta,
            "guidance_scale": own.guidance_scale,
            "clip_skip": 0,
            "precision": PRECISION,
        }
        chosen |= {key: value for key, value in (record or {}).items() if value is not None}
        most = min(limits.steps, card.num_train_timesteps)
        return {
            "steps": {"maximum": most, "value": min(chosen["num_inference_steps"], most)},
            "scheduler": {"value": chosen["scheduler"]},
            "eta": {"value": chosen["eta"], "visible": chosen["scheduler"] == "ddim"},
            "guidance_scale": {
                "maximum": max(MAX_TEXT_GUIDANCE if card.reads_text else MAX_GUIDANCE, chosen["guidance_scale"]),
                "value": chosen["guidance_scale"],
                "info": f"How much the {'prompt' if card.reads_text else 'label'} counts; 1 is plain",
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
        self, models: Models, cards: tuple[ModelCard, ModelCard], limits: Limits, data: Mapping[Component, Any]
    ) -> Updates:
        """The controls for the second of `cards`: its defaults, and what was changed for the first if it is alike."""
        before, card = cards
        defaults = self.properties(models, before, limits)
        values = {name: data[getattr(self, name)] for name in defaults}
        changed = {name: value for name, value in values.items() if value != defaults[name]["value"]}
        if "steps" in changed:
            changed["num_inference_steps"] = changed.pop("steps")
        return self.updates(self.properties(models, card, limits, changed if are_alike(before, card) else None))

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """The fields of ui.options.Options that these controls are for; None where the model has no such choice."""
        return {
            "steps": data[self.steps],
            "scheduler": data[self.scheduler],
            "eta": data[self.eta] if data[self.scheduler] == "ddim" else None,
            "guidance_scale": data[self.guidance_scale] if can_guide(card) else None,
            "clip_skip": data[self.clip_skip] if card.reads_text else None,
            "precision": data[self.precision],
        }


@dataclass(frozen=True)
class Size(Controls):
    """Width and height of the pictures, in steps that the model can draw; of one that reads text also by its shapes."""

    shape: gr.Radio | gr.Dropdown
    width: gr.Slider
    height: gr.Slider

    @classmethod
    def build(cls, card: ModelCard, limits: Limits, picker: type[gr.Radio] | type[gr.Dropdown] = gr.Radio) -> "Size":
        """In a row. `picker` is that of the shapes: all at a glance on a line of their own, or beside the sides."""
        properties = cls.properties(card, limits)
        size = cls(
            shape=picker(label="Size", min_width=320 if picker is gr.Radio else 140, **properties["shape"]),
            width=gr.Slider(label="Width", min_width=140, **properties["width"]),
            height=gr.Slider(label="Height", min_width=140, **properties["height"]),
        )
        sides = [size.width, size.height]
        size.shape.input(lambda text: [int(side) for side in text.split("x")], size.shape, sides, **QUICK)
        gr.on([side.input for side in sides], lambda: None, None, size.shape, **QUICK)  # a size of one's own
        return size

    @staticmethod
    def properties(card: ModelCard, limits: Limits, record: Mapping[str, Any] | None = None) -> Properties:
        """For `card`, with the size of a picture's `record` or the one the model was trained at."""
        multiple = card.size_factor
        width, height = card.size or (8 * multiple, 8 * multiple)
        width, height = (record or {}).get("width", width), (record or {}).get("height", height)
        shared = {
            "minimum": multiple,
            "maximum": limits.side // multiple * multiple,
            "step": multiple,
            "info": f"Trained at {card.size[0]}x{card.size[1]}; others may fall apart" if card.size else None,
        }
        shapes = [_shape(*each) for each in shapes_of(card, limits)] if card.reads_text else []
        chosen = _shape(width, height)
        shape = {"choices": shapes, "value": chosen if chosen in shapes else None, "visible": len(shapes) > 1}
        return {"shape": shape, "width": {"value": width, **shared}, "height": {"value": height, **shared}}


def shapes_of(card: ModelCard, limits: Limits) -> list[tuple[int, int]]:
    """(width, height) of the sizes on offer: the model's own, then others of about as many pixels within the limits."""
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


@dataclass(frozen=True)
class SeedField(Controls):
    """The seed of a run, which the next run takes again where it is locked; else that takes a new one."""

    seed: gr.Number
    lock: gr.Checkbox
    spent: gr.State  # the seed that was drawn last; None where another was chosen since

    @classmethod
    def build(cls) -> "SeedField":
        with gr.Group():
            seed = seed_field()
            lock = gr.Checkbox(False, label="Keep this seed", info="Else each run takes a new one", min_width=100)
            field = cls(seed, lock, gr.State(None))
        seed.input(lambda: None, None, field.spent, **QUICK)
        return field

    def chosen(self, data: Mapping[Component, Any]) -> Any:
        """The seed of the next run, unchecked."""
        seed = data[self.seed]
        is_spent = seed is not None and seed == data[self.spent] and not data[self.lock]
        return secrets.randbelow(MAX_SEED + 1) if is_spent else seed

    def show(self, seed: int) -> Updates:
        """The field with a seed that the next run draws."""
        return {self.seed: seed, self.spent: None}


def seed_field() -> gr.Number:
    """A seed, with a button below it for another."""
    with gr.Group():
        seed = gr.Number(SEED, label="Seed", info=f"0 to {MAX_SEED}")
        new = gr.Button("New seed", size="sm")
    new.click(lambda: secrets.randbelow(MAX_SEED + 1), None, seed, **QUICK)
    return seed
