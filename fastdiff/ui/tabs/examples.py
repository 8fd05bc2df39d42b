"""Examples of the bundled models: something to draw and a seed that draws it well."""

from typing import Any, NamedTuple

import gradio as gr

from fastdiff.checkpoints.model_card import ModelCard


class Example(NamedTuple):
    """A label or a prompt of a model, and a seed."""

    subject: str
    seed: int


EXAMPLES: dict[str, list[Example]] = {  # by the model's name; those of a text model are prompts
    "emoji64": [
        Example("fluent-3d smiling faces", 0),  # what the page opens with
        Example("noto birds", 4),
        Example("fluent-3d portraits", 5),
        Example("twemoji fruit", 4),
        Example("noto railways", 3),
        Example("twemoji buildings", 1),
    ],
}


def examples_of(card: ModelCard) -> list[Example]:
    """The examples of a model; none of one that is not bundled."""
    return EXAMPLES.get(card.name, [])


def build_examples(card: ModelCard) -> gr.Dataset:
    """A row of examples; a click on one gives its index in `examples_of`."""
    return gr.Dataset(
        label="Examples",
        components=["textbox"],
        samples=_samples(card),
        visible=bool(examples_of(card)),
        type="index",
        layout="gallery",
        elem_id="examples",
    )


def fit_examples(card: ModelCard) -> dict[str, Any]:
    """The update that shows the examples of another model, or none."""
    return gr.update(samples=_samples(card), visible=bool(examples_of(card)))


def _samples(card: ModelCard) -> list[list[str]]:
    return [[example.subject] for example in examples_of(card)]
