"""The fields of an X/Y sheet: two axes, each a setting and the values that somebody types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import SCHEDULERS
from fastdiff.ui.messages import PROBLEMS, field_name
from fastdiff.ui.options import Options
from fastdiff.ui.sheets.axes import AXIS_NAMES, Axes, Axis
from fastdiff.ui.tabs.controls import can_guide
from fastdiff.ui.tabs.running import QUICK, Updates

_NONE = ""  # the choice of no axis
_TITLE = "X/Y sheet"
_HINTS = {
    "seed": "Such as 0-3, or 1, 5, 9",
    "steps": "Such as 5, 10, 20, or 5-20 (+5)",
    "guidance_scale": "Such as 1, 2.5, 4, or 1-7 [4]",
    "scheduler": f"Of {', '.join(SCHEDULERS)}",
    "label": "Between commas, or one a line",
    "prompt": "One a line",
}


@dataclass(frozen=True)
class AxisFields:
    box: gr.Accordion
    x: gr.Dropdown
    x_values: gr.Textbox
    y: gr.Dropdown
    y_values: gr.Textbox

    @classmethod
    def build(cls, card: ModelCard) -> "AxisFields":
        with gr.Accordion(_TITLE, open=False, elem_id="axes") as box:
            gr.Markdown("One picture for each pair of values, and a sheet of all. All else is as the form says.")
            fields = [part for name in ("X: columns", "Y: rows") for part in _build_axis(name, card)]
        return cls(box, *fields)  # type: ignore[arg-type]  # of both kinds in turn

    @property
    def components(self) -> list[Component]:
        return [part for axis in self._axes for part in axis]

    @property
    def _axes(self) -> list[tuple[gr.Dropdown, gr.Textbox]]:
        return [(self.x, self.x_values), (self.y, self.y_values)]

    def chosen(self, data: Mapping[Component, Any]) -> Axes:
        """The axes that are asked for. InputError for values that cannot be."""
        return Axes(*(Axis.parse(data[name], data[values]) if data[name] else None for name, values in self._axes))

    def show(self, card: ModelCard, axes: Axes) -> Updates:
        """The fields with the axes of a sheet, or with none."""
        updates: Updates = {self.box: gr.update(open=bool(axes))}
        for (name, values), axis in zip(self._axes, (axes.x, axes.y), strict=True):
            updates |= _update(name, values, card, axis.name if axis else _NONE, axis.text if axis else "")
        return updates

    def fit(self, card: ModelCard, data: Mapping[Component, Any], keep_label: bool = True) -> Updates:
        """The fields for another model, with what is typed where the model has such a setting."""
        updates: Updates = {}
        for name, values in self._axes:
            kept = data[name] in _offered(card) and (keep_label or data[name] != "label")
            updates |= _update(name, values, card, data[name] if kept else _NONE, str(data[values]) if kept else "")
        return updates

    def follow(
        self, inputs: set[Block], options: Callable[[Mapping[Component, Any]], Options], steps: Component
    ) -> None:
        """Give an axis that is chosen values to begin with, and tell in the title how much the sheet is."""
        for name, values in self._axes:
            name.input(_begin(name, values, options), inputs, values, **QUICK)

        def count(data: Mapping[Component, Any]) -> dict[str, Any]:
            try:
                return gr.update(label=_title(self.chosen(data), data[steps]))
            except PROBLEMS:  # Generate says which
                return gr.update(label=f"{_TITLE}: not complete")

        changes = [field.change for field in (*self.components, steps)]  # type: ignore[attr-defined]
        gr.on(changes, count, inputs, self.box, trigger_mode="always_last", **QUICK)


def _build_axis(label: str, card: ModelCard) -> tuple[gr.Dropdown, gr.Textbox]:
    with gr.Row():
        name = gr.Dropdown(_choices(card), value=_NONE, label=label, min_width=120, scale=1)
        values = gr.Textbox(label=f"{label[0]} values", lines=2, max_lines=6, visible=False, min_width=160, scale=2)
    return name, values


def _offered(card: ModelCard) -> list[str]:
    """The settings that can be axes for a model."""
    can = {"guidance_scale": can_guide(card), "label": bool(card.labels), "prompt": card.reads_text}
    can["label"] = can["label"] and not card.reads_text
    return [name for name in AXIS_NAMES if can.get(name, True)]


def _choices(card: ModelCard) -> list[tuple[str, str]]:
    return [("None", _NONE), *((field_name(name), name) for name in _offered(card))]


def _update(name: gr.Dropdown, values: gr.Textbox, card: ModelCard, chosen: str, text: str) -> Updates:
    return {
        name: gr.update(choices=_choices(card), value=chosen),
        values: gr.update(value=text, visible=bool(chosen), info=_HINTS.get(chosen)),
    }


def _begin(
    name: gr.Dropdown, values: gr.Textbox, options: Callable[[Mapping[Component, Any]], Options]
) -> Callable[[Mapping[Component, Any]], dict[str, Any]]:
    def begin(data: Mapping[Component, Any]) -> dict[str, Any]:
        """Values to change, that of the form among them."""
        axis = data[name]
        try:
            value = getattr(options(data), axis) if axis else None
        except PROBLEMS:  # the model is gone
            value = None
        return gr.update(value=_first_values(axis, value), visible=bool(axis), info=_HINTS.get(axis))

    return begin


def _first_values(axis: str, value: Any) -> str:
    if axis == "seed" and isinstance(value, int):
        return ", ".join(str(value + i) for i in range(4))
    if axis == "scheduler":
        return ", ".join(dict.fromkeys([str(value), "ddim", "euler", "dpm++2m"]))
    fixed = {"steps": "5, 10, 20", "guidance_scale": "1, 2, 4"}
    return fixed.get(axis) or ("" if value is None else " ".join(str(value).splitlines()) + "\n")


def _title(axes: Axes, steps: Any) -> str:
    if not axes:
        return _TITLE
    settings = axes.settings()
    total = sum(each.get("steps", steps) for each in settings)
    return f"{_TITLE}: {axes.columns} x {axes.rows} = {len(settings)} pictures, {total:,} steps"
