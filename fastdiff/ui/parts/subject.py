"""The subject of the pictures: label pickers, or prompt boxes for a model that reads text."""

import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.requests.request import MAX_PROMPT, Prompt
from fastdiff.schema import checked
from fastdiff.text.tokenizer import CLIPTokenizer
from fastdiff.ui.parts.catalogue import Catalogue
from fastdiff.ui.parts.controls import Controls, Properties
from fastdiff.ui.parts.examples import examples_of
from fastdiff.ui.parts.messages import PROBLEMS, problem
from fastdiff.ui.parts.running import QUICK, Updates

Choices = list[tuple[str, str | int]]  # (text, label or group) pairs


@dataclass(frozen=True)
class LabelPickers(Controls):
    """Label pickers: one for style and one for group if the label names begin with styles, else one for all labels."""

    style: gr.Dropdown
    group: gr.Dropdown
    label: gr.Dropdown

    @classmethod
    def build(cls, card: ModelCard) -> "LabelPickers":
        properties = cls.properties(card)
        with gr.Row():
            return cls(
                style=gr.Dropdown(label="Style", min_width=130, **properties["style"]),
                group=gr.Dropdown(label="Group", min_width=130, **properties["group"]),
                label=gr.Dropdown(label="Label", **properties["label"]),
            )

    @staticmethod
    def offers(card: ModelCard, label: str | int | None) -> bool:
        """Return whether `label` can be chosen. A model without labels offers only None."""
        return label in {name for _, name in _choices(card)} if card.labels else label is None

    @staticmethod
    def properties(card: ModelCard, chosen: str | int | None = None) -> Properties:
        """Return the properties for `card`, with the label or group `chosen`, or with the first choice for None."""
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
        """Fit the pickers to another model, with the same label if the model has it."""
        label = self.chosen(data)
        return self.updates(self.properties(card, label if self.offers(card, label) else None))

    def follow(self, catalogue: Catalogue, model: gr.Dropdown) -> None:
        """Update the groups when the style changes. The chosen group stays if the new style has it."""

        def groups(name: str, style: str, group: str) -> dict[str, Any]:
            choices = _choices(catalogue.card(name), style)
            names = [name for _, name in choices]
            return gr.update(choices=choices, value=group if group in names else names[0])

        inputs = [model, self.style, self.group]
        self.style.input(groups, inputs, self.group, **QUICK)

    def chosen(self, data: Mapping[Component, Any]) -> str | int | None:
        """Return the chosen label or group; None for an unconditional model."""
        style, group = data[self.style], data[self.group]
        return data[self.label] if style is None or group is None else f"{style} {group}"


def _first_choice(card: ModelCard, names: Sequence[str | int]) -> str | int | None:
    """Return the label that the form opens with: from the model's first example, else the model's first label."""
    examples = [example.subject for example in examples_of(card)]
    return next((name for name in [*examples, *names] if name in names), None)


def _styles(card: ModelCard) -> list[str]:
    """Return the first words of the label names, if each begins several names and no group mixes them, else []."""
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
    """Return (text, name) of each group and label, with each group before its labels. `style` is cut from the names."""
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
class PromptBoxes(Controls):
    """The prompt, the negative prompt, and their token counts. Enter in a box starts a run."""

    prompt: gr.Textbox
    negative_prompt: gr.Textbox
    tokens: gr.HTML

    @classmethod
    def build(cls, catalogue: Catalogue, card: ModelCard) -> "PromptBoxes":
        properties = cls.properties(catalogue, [card])

        def box(name: str, label: str, hint: str) -> gr.Textbox:
            options = properties[name]
            return gr.Textbox(label=label, placeholder=hint, lines=1, max_lines=6, max_length=MAX_PROMPT, **options)

        with gr.Group():
            return cls(
                prompt=box("prompt", "Prompt", "Describe the picture"),
                negative_prompt=box("negative_prompt", "Negative prompt", "What to avoid"),
                tokens=gr.HTML(elem_classes="tokens", **properties["tokens"]),
            )

    @staticmethod
    def properties(
        catalogue: Catalogue, cards: Sequence[ModelCard], record: Mapping[str, Any] | None = None
    ) -> Properties:
        """Return the properties for `cards`, with the texts of a picture's `record` or the first model's first example.

        The boxes are visible if one of the models reads text.
        """
        texts = record or {"prompt": next((example.subject for example in examples_of(cards[0])), "")}
        prompt, negative = texts.get("prompt") or "", texts.get("negative_prompt") or ""
        visible = any(card.reads_text for card in cards)
        return {
            "prompt": {"value": prompt if visible else "", "visible": visible},
            "negative_prompt": {"value": negative, "visible": visible},
            "tokens": {"value": count_tokens(catalogue, cards, prompt, negative), "visible": visible},
        }

    def fit(self, catalogue: Catalogue, cards: Sequence[ModelCard], data: Mapping[Component, Any]) -> Updates:
        """Fit the boxes to other models. Typed text stays; empty boxes get the first model's first example."""
        texts = {"prompt": data[self.prompt], "negative_prompt": data[self.negative_prompt]}
        is_empty = not any(texts.values())
        properties = self.properties(catalogue, cards, None if is_empty else texts)
        del properties["tokens"]["value"]  # the picker's change event counts: a count here would miss new typing
        if not is_empty or not properties["prompt"]["value"]:
            del properties["prompt"]["value"], properties["negative_prompt"]["value"]  # the user may still be typing
        return self.updates(properties)

    def follow(self, catalogue: Catalogue, pickers: Sequence[gr.Dropdown]) -> None:
        """Count the tokens again when a text or a model of `pickers` changes."""

        def count(prompt: str, negative: str, *names: str) -> str:
            try:
                return count_tokens(catalogue, [catalogue.card(name) for name in names], prompt, negative)
            except PROBLEMS as error:
                return problem(error)

        boxes = [self.prompt, self.negative_prompt]
        changes = [box.change for box in boxes] + [picker.change for picker in pickers]
        gr.on(changes, count, [*boxes, *pickers], self.tokens, trigger_mode="always_last", **QUICK)

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of the boxes. An empty negative prompt becomes None."""
        if not card.reads_text:
            return {}
        return {"prompt": data[self.prompt] or "", "negative_prompt": data[self.negative_prompt] or None}


def count_tokens(catalogue: Catalogue, cards: Sequence[ModelCard], prompt: str, negative: str = "") -> str:
    """Return the HTML of the token counts, with the end that is cut off. Raises InputError for an invalid text."""
    tokenizers = [tokenizer for card in cards if card.reads_text for tokenizer in catalogue.tokenizers(card)]
    lines = list(_lines("", prompt, tokenizers))
    lines += _lines("Negative prompt: ", negative, tokenizers) if negative else []
    return "".join(f"<div>{line}</div>" for line in lines)


def _lines(name: str, text: str, tokenizers: Sequence[CLIPTokenizer]) -> Iterator[str]:
    """Yield a line for each tokenizer. Tokenizers with equal results share a line."""
    checked(name or "prompt", text, Prompt)
    lines: dict[str, None] = {}
    for tokenizer in tokenizers:
        tokens = tokenizer(text)
        cut = " ".join(tokens.cut.split())
        line = f"{name}{tokens.total} of {tokenizer.room} tokens"
        lines[line + (f'; cut off: <strong class="cut">{html.escape(cut)}</strong>' if cut else "")] = None
    yield from lines
