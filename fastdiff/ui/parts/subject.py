"""The subject of the pictures: label pickers, or prompt boxes for a model that reads text."""

import html
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.requests.request import MAX_PROMPT, Prompt
from fastdiff.schema import checked
from fastdiff.text.tokenizer import CLIPTokenizer
from fastdiff.text.weighted.chunks import split_chunks
from fastdiff.text.weighted.emphasis import check_prompt
from fastdiff.text.weighted.schedule import parse_schedule
from fastdiff.ui.parts.controls import Controls, Properties
from fastdiff.ui.parts.examples import examples_of
from fastdiff.ui.queueing.messages import PROBLEMS, problem
from fastdiff.ui.queueing.running import QUICK, Updates

MAX_RECENT = 20  # prompts
SHORT = 80  # characters of a recent prompt in the list
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
        with gr.Row(elem_classes="labels"):
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
    """The prompt and the negative prompt, each with its token count, the styles, and the user's last prompts."""

    prompt: gr.Textbox
    tokens: gr.HTML
    styles: gr.Dropdown
    recent: gr.Dropdown
    negative_prompt: gr.Textbox
    negative_tokens: gr.HTML

    @classmethod
    def build(cls, catalogue: Catalogue, card: ModelCard) -> "PromptBoxes":
        properties = cls.properties(catalogue, [card])

        def box(name: str, label: str, hint: str, lines: int) -> gr.Textbox:
            options = properties[name]
            return gr.Textbox(
                label=label, placeholder=hint, lines=lines, max_lines=12, max_length=MAX_PROMPT, **options
            )

        def count(name: str) -> gr.HTML:
            return gr.HTML(padding=False, elem_classes="tokens", **properties[name])

        with gr.Group(elem_classes="prompts"):
            prompt, tokens = box("prompt", "Prompt", "Describe the picture", 3), count("tokens")
            with gr.Row():
                names = catalogue.styles.names
                styles = gr.Dropdown(names, multiselect=True, label="Styles", min_width=140, **properties["styles"])
                recent = gr.Dropdown([], label="Recent prompts", min_width=140, **properties["recent"])
            negative = box("negative_prompt", "Negative prompt", "What to avoid", 2)
            return cls(prompt, tokens, styles, recent, negative, count("negative_tokens"))

    @staticmethod
    def properties(
        catalogue: Catalogue, cards: Sequence[ModelCard], record: Mapping[str, Any] | None = None
    ) -> Properties:
        """Return the properties for `cards`, with the texts of a picture's `record` or the first model's first example.

        The boxes are visible if one of the models reads text. No style is chosen, because the texts are whole.
        """
        texts = record or {"prompt": next((example.subject for example in examples_of(cards[0])), "")}
        prompt, negative = texts.get("prompt") or "", texts.get("negative_prompt") or ""
        visible = any(card.reads_text for card in cards)
        return {
            "prompt": {"value": prompt if visible else "", "visible": visible},
            "tokens": {"value": count_tokens(catalogue, cards, prompt), "visible": visible},
            "styles": {"value": [], "visible": visible and bool(catalogue.styles.names)},
            "recent": {"value": None, "visible": visible},
            "negative_prompt": {"value": negative, "visible": visible},
            "negative_tokens": {
                "value": count_tokens(catalogue, cards, negative, "negative_prompt"),
                "visible": visible,
            },
        }

    def fit(self, catalogue: Catalogue, cards: Sequence[ModelCard], data: Mapping[Component, Any]) -> Updates:
        """Fit the boxes to other models. Typed text stays; empty boxes get the first model's first example."""
        texts = {"prompt": data[self.prompt], "negative_prompt": data[self.negative_prompt]}
        is_empty = not any(texts.values())
        properties = self.properties(catalogue, cards, None if is_empty else texts)
        del properties["styles"]["value"]
        for name in ("tokens", "negative_tokens"):
            del properties[name]["value"]  # the picker's change event counts: a count here would miss new typing
        if not is_empty or not properties["prompt"]["value"]:
            del properties["prompt"]["value"], properties["negative_prompt"]["value"]  # the user may still be typing
        return self.updates(properties)

    def follow(self, catalogue: Catalogue, pickers: Sequence[gr.Dropdown], syntax: gr.Dropdown | None) -> None:
        """Count the tokens again when a text, the styles, the syntax or a model of `pickers` changes."""

        def count(prompt: str, negative: str, styles: list[str] | None, *chosen: str) -> tuple[str, str]:
            names, syntaxes = chosen[: len(pickers)], chosen[len(pickers) :]
            is_weighted = "weighted" in syntaxes
            try:
                cards = [catalogue.card(name) for name in names]
                prompt, negative = catalogue.styles.apply(styles or [], prompt, negative)
                of_prompt = count_tokens(catalogue, cards, prompt, is_weighted=is_weighted)
                of_negative = count_tokens(catalogue, cards, negative, "negative_prompt", is_weighted=is_weighted)
                return of_prompt, of_negative
            except PROBLEMS as error:
                return problem(error), ""

        boxes: list[gr.Textbox | gr.Dropdown] = [self.prompt, self.negative_prompt, self.styles]
        inputs = [*boxes, *pickers, *([] if syntax is None else [syntax])]
        counts = [self.tokens, self.negative_tokens]
        gr.on([each.change for each in inputs], count, inputs, counts, trigger_mode="always_last", **QUICK)

    def offer_recent(self, session: gr.State) -> None:
        """Offer the last prompts of the user of a `session` when the list is opened. A click fills the prompt's box."""

        def offer(session: Any, request: gr.Request) -> dict[str, Any]:
            prompts = session.shelf(request).index.prompts(MAX_RECENT)
            return gr.update(choices=[(textwrap.shorten(each, SHORT, placeholder="…"), each) for each in prompts])

        self.recent.focus(offer, session, self.recent, **QUICK)
        filled = [self.prompt, self.styles, self.recent]
        self.recent.input(None, self.recent, filled, js="(text) => [text, [], null]", **QUICK)  # the text is whole

    def known_styles(self, catalogue: Catalogue, data: Mapping[Component, Any]) -> list[str]:
        """Return the chosen styles, as far as the server's file still has them."""
        chosen = data[self.styles] if isinstance(data[self.styles], list) else []
        return [name for name in catalogue.styles.names if name in chosen]

    def chosen(self, catalogue: Catalogue, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of the boxes, with the styles applied.

        An empty negative prompt becomes None. Raises InputError for an unknown style.
        """
        if not card.reads_text:
            return {}
        prompt, negative, styles = data[self.prompt] or "", data[self.negative_prompt] or "", data[self.styles]
        if styles:
            prompt, negative = catalogue.styles.apply(styles, prompt, negative)
        return {"prompt": prompt, "negative_prompt": negative or None}


def count_tokens(
    catalogue: Catalogue,
    cards: Sequence[ModelCard],
    text: str,
    name: str = "prompt",
    *,
    is_weighted: bool = False,
) -> str:
    """Return the HTML of the token counts of a text, with the end that is cut off.

    A weighted text has the number of its chunks at the first step. Tokenizers with equal results share a line. Raises
    InputError, which begins with `name`, for an invalid text.
    """
    checked(name, text, Prompt)
    lines: dict[str, None] = {}
    for tokenizer in (each for card in cards if card.reads_text for each in catalogue.tokenizers(card)):
        if is_weighted and isinstance(tokenizer, CLIPTokenizer):
            check_prompt(text, name)
            chunks = split_chunks(parse_schedule(text).at(0, 1), tokenizer)
            count = sum(chunk.ids[1:].index(tokenizer.end) for chunk in chunks)
            of = "1 chunk" if len(chunks) == 1 else f"{len(chunks)} chunks"
            lines[f"{count} tokens in {of} of {tokenizer.room}"] = None
            continue
        tokens = tokenizer(tokenizer.expand(text))
        cut = " ".join(tokens.cut.split())
        line = f"{tokens.total} of {tokenizer.room} tokens"
        lines[line + (f'; cut off: <strong class="cut">{html.escape(cut)}</strong>' if cut else "")] = None
    return "".join(f"<div>{line}</div>" for line in lines)
