"""Examples of the bundled models: PNG files in examples/ of each model folder, with their settings inside."""

import base64
import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.requests import png

_TELL = """
element.addEventListener("click", ({target}) => {
    const example = target.closest("button");
    if (example) trigger("click", {name: example.dataset.name});
});"""


@dataclass(frozen=True)
class Example:
    """A picture, and the settings in its PNG file, from which the page draws the same picture."""

    path: Path
    record: dict[str, Any]

    @property
    def subject(self) -> str:
        """The label or prompt."""
        return self.record.get("prompt") or self.record["label"]


def examples_of(card: ModelCard) -> list[Example]:
    """Return the examples of a model, sorted by file name. A model that is not bundled has none."""
    if card.folder not in hub.bundled_models().values():
        return []
    return [Example(path, png.read_settings(path)) for path in sorted((card.folder / "examples").glob("*.png"))]


def example_of(card: ModelCard, event: gr.EventData) -> Example:
    """Return the example that was clicked. Raises gr.Error if `card` has no such example."""
    name = getattr(event, "name", None)
    for example in examples_of(card):
        if example.path.name == name:
            return example
    raise gr.Error(f"{card.name} has no such example; choose another", print_exception=False)


def build_examples(card: ModelCard) -> gr.HTML:
    """Build the pictures that fill the empty stage. A click triggers an event for `example_of`."""
    return gr.HTML(**_properties(card), js_on_load=_TELL, apply_default_css=False, elem_id="examples")


def fit_examples(card: ModelCard) -> dict[str, Any]:
    """Return the update that shows the examples of another model, or none if it has none."""
    return gr.update(**_properties(card))


def _properties(card: ModelCard) -> dict[str, Any]:
    examples = examples_of(card)
    pictures = "".join(map(_button, examples))
    return {"value": f'Examples (click to draw)<div class="examples">{pictures}</div>', "visible": bool(examples)}


def _button(example: Example) -> str:
    data = base64.b64encode(example.path.read_bytes()).decode()
    subject = html.escape(example.subject)
    return (
        f'<button data-name="{html.escape(example.path.name)}">'
        f'<img alt="" src="data:image/png;base64,{data}">{subject}</button>'
    )
