"""The boxes of a model that reads text: the prompt, the negative prompt, and how many tokens of them it reads."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.kinds import MAX_PROMPT, Prompt
from fastdiff.schema import checked
from fastdiff.text.tokenizer import CLIPTokenizer
from fastdiff.ui.messages import PROBLEMS, problem
from fastdiff.ui.models import Models
from fastdiff.ui.tabs.controls import Controls, Properties, Updates
from fastdiff.ui.tabs.examples import examples_of
from fastdiff.ui.tabs.running import QUICK


@dataclass(frozen=True)
class PromptBoxes(Controls):
    """In place of the pickers of labels. Enter in a box draws."""

    prompt: gr.Textbox
    negative_prompt: gr.Textbox
    tokens: gr.HTML

    @classmethod
    def build(cls, models: Models, card: ModelCard) -> "PromptBoxes":
        properties = cls.properties(models, [card])

        def box(name: str, label: str, hint: str) -> gr.Textbox:
            options = properties[name]
            return gr.Textbox(label=label, placeholder=hint, lines=1, max_lines=6, max_length=MAX_PROMPT, **options)

        with gr.Group():
            return cls(
                prompt=box("prompt", "Prompt", "Say what to draw"),
                negative_prompt=box("negative_prompt", "Negative prompt", "What to lead away from, if anything"),
                tokens=gr.HTML(elem_classes="tokens", **properties["tokens"]),
            )

    @staticmethod
    def properties(models: Models, cards: Sequence[ModelCard], record: Mapping[str, Any] | None = None) -> Properties:
        """For `cards`, with the texts in a picture's `record` or those of the first model's first example.

        The boxes are shown where one of the models reads text.
        """
        texts = record or {"prompt": next((example.subject for example in examples_of(cards[0])), "")}
        prompt, negative = texts.get("prompt") or "", texts.get("negative_prompt") or ""
        visible = any(card.reads_text for card in cards)
        return {
            "prompt": {"value": prompt if visible else "", "visible": visible},
            "negative_prompt": {"value": negative, "visible": visible},
            "tokens": {"value": count_tokens(models, cards, prompt, negative), "visible": visible},
        }

    def fit(self, models: Models, cards: Sequence[ModelCard], data: Mapping[Component, Any]) -> Updates:
        """The boxes for other models. What is typed stays; where nothing is, the first model's first example comes."""
        texts = {"prompt": data[self.prompt], "negative_prompt": data[self.negative_prompt]}
        is_empty = not any(texts.values())
        properties = self.properties(models, cards, None if is_empty else texts)
        del properties["tokens"]["value"]  # counted as the picker changes: what is typed now would be left out here
        if not is_empty or not properties["prompt"]["value"]:
            del properties["prompt"]["value"], properties["negative_prompt"]["value"]  # somebody may go on typing
        return self.updates(properties)

    def follow(self, models: Models, pickers: Sequence[gr.Dropdown]) -> None:
        """Count the tokens for the models of `pickers` as these or the texts change."""

        def count(prompt: str, negative: str, *names: str) -> str:
            try:
                return count_tokens(models, [models.card(name) for name in names], prompt, negative)
            except PROBLEMS as error:
                return problem(error)

        boxes = [self.prompt, self.negative_prompt]
        changes = [box.change for box in boxes] + [picker.change for picker in pickers]
        gr.on(changes, count, [*boxes, *pickers], self.tokens, trigger_mode="always_last", **QUICK)

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """The fields of ui.options.Options that the boxes are for; an empty negative prompt is none."""
        if not card.reads_text:
            return {}
        return {"prompt": data[self.prompt] or "", "negative_prompt": data[self.negative_prompt] or None}


def count_tokens(models: Models, cards: Sequence[ModelCard], prompt: str, negative: str = "") -> str:
    """HTML: how many tokens of each text the models read, and the end that they do not. InputError for no texts."""
    tokenizers = [tokenizer for card in cards if card.reads_text for tokenizer in models.tokenizers(card)]
    lines = list(_lines("", prompt, tokenizers))
    lines += _lines("Negative prompt: ", negative, tokenizers) if negative else []
    return "".join(f"<div>{line}</div>" for line in lines)


def _lines(name: str, text: str, tokenizers: Sequence[CLIPTokenizer]) -> Iterator[str]:
    """The line of each tokenizer that counts otherwise than those before it."""
    checked(name or "prompt", text, Prompt)
    lines: dict[str, None] = {}
    for tokenizer in tokenizers:
        tokens = tokenizer(text)
        cut = " ".join(tokens.cut.split())
        line = f"{name}{tokens.total} of {tokenizer.room} tokens"
        lines[line + (f'; cut: <strong class="cut">{html.escape(cut)}</strong>' if cut else "")] = None
    yield from lines
