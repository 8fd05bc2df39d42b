"""The fields of an X/Y sheet: two axes, each with a setting and typed values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.sampler_names import SCHEDULERS
from fastdiff.ui.inputs.axes import AXIS_NAMES, Axes, Axis
from fastdiff.ui.parts.controls import can_guide
from fastdiff.ui.parts.request import UncheckedRequest
from fastdiff.ui.queueing.messages import PROBLEMS, field_name, number_of_pictures
from fastdiff.ui.queueing.running import QUICK, Updates

_NONE = ""  # the value of the choice None
_TITLE = "X/Y sheet"
_HINTS = {
    "seed": "For example 0-3, or 1, 5, 9",
    "steps": "For example 5, 10, 20, or 5-20 (+5)",
    "guidance_scale": "For example 1, 2.5, 4, or 1-7 [4]",
    "scheduler": f"Choose from {', '.join(SCHEDULERS)}",
    "label": "Separated by commas, or one per line",
    "prompt": "One per line",
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
            gr.Markdown("One picture per pair of values, and a sheet of all. Uses the settings above, except Pictures.")
            fields = [part for name in ("X: columns", "Y: rows") for part in _build_axis(name, card)]
        return cls(box, *fields)  # type: ignore[arg-type]  # dropdown and textbox in turn

    @property
    def components(self) -> list[Component]:
        return [part for axis in self._axes for part in axis]

    @property
    def _axes(self) -> list[tuple[gr.Dropdown, gr.Textbox]]:
        return [(self.x, self.x_values), (self.y, self.y_values)]

    def chosen(self, data: Mapping[Component, Any]) -> Axes:
        """Return the chosen axes. Raises InputError for invalid values."""
        return _axes([(data[name], data[values]) for name, values in self._axes])

    def show(self, card: ModelCard, axes: Axes) -> Updates:
        """Fill in the axes of a sheet, or clear the fields."""
        return self._fill(card, [(axis.name, axis.text) if axis else (_NONE, "") for axis in (axes.x, axes.y)])

    def fit(self, card: ModelCard, data: Mapping[Component, Any], keep_label: bool = True) -> Updates:
        """Fit the fields to another model. Typed values stay if the model has the setting."""
        offered = {*_offered(card)} - ({"label"} if not keep_label else set())
        typed = [(data[name], str(data[values])) for name, values in self._axes]
        return self._fill(card, [each if each[0] in offered else (_NONE, "") for each in typed])

    def _fill(self, card: ModelCard, typed: Sequence[tuple[str, str]]) -> Updates:
        opened: dict[str, Any] = {"open": True} if any(name for name, _ in typed) else {}
        updates: Updates = {self.box: gr.update(label=_title(typed), **opened)}
        for (name, values), (chosen, text) in zip(self._axes, typed, strict=True):
            updates[name] = gr.update(choices=_choices(card), value=chosen)
            updates[values] = gr.update(value=text, visible=bool(chosen), info=_HINTS.get(chosen))
        return updates

    def follow(self, inputs: set[Block], request: Callable[[Mapping[Component, Any]], UncheckedRequest]) -> None:
        """Fill in initial values when an axis is chosen, and show the number of pictures in the title."""

        def count(*typed: str) -> dict[str, Any]:
            return gr.update(label=_title([(typed[0], typed[1]), (typed[2], typed[3])]))

        for name, values in self._axes:
            name.input(self._begin(name, values, request), inputs, [values, self.box], preprocess=False, **QUICK)
            # not on change: a restored form changes field by field, and the answers come in any order
            edits = [values.input, values.blur]
            gr.on(edits, count, self.components, self.box, trigger_mode="always_last", **QUICK)

    def _begin(
        self, name: gr.Dropdown, values: gr.Textbox, request: Callable[[Mapping[Component, Any]], UncheckedRequest]
    ) -> Callable[[Mapping[Component, Any]], Updates]:
        def begin(data: Mapping[Component, Any]) -> Updates:
            """Return initial values, which include the form's own value."""
            axis = data[name]
            try:
                value = getattr(request(data), axis) if axis else None
            except PROBLEMS:  # the model no longer exists
                value = None
            text = _first_values(axis, value)
            typed = {**data, values: text}
            return {
                values: gr.update(value=text, visible=bool(axis), info=_HINTS.get(axis)),
                self.box: gr.update(label=_title([(typed[each], typed[its]) for each, its in self._axes])),
            }

        return begin


def _build_axis(label: str, card: ModelCard) -> tuple[gr.Dropdown, gr.Textbox]:
    with gr.Row():
        name = gr.Dropdown(_choices(card), value=_NONE, label=label, min_width=136, scale=1)
        values = gr.Textbox(label=f"{label[0]} values", lines=2, max_lines=6, visible=False, min_width=116, scale=2)
    return name, values


def _offered(card: ModelCard) -> list[str]:
    """Return the settings that can be axes for a model."""
    can = {
        "guidance_scale": can_guide(card),
        "label": bool(card.labels) and not card.reads_text,
        "prompt": card.reads_text,
    }
    return [name for name in AXIS_NAMES if can.get(name, True)]


def _choices(card: ModelCard) -> list[tuple[str, str]]:
    return [("None", _NONE), *((field_name(name), name) for name in _offered(card))]


def _first_values(axis: str, value: Any) -> str:
    if axis == "seed":  # a random seed, too, begins with 0
        return ", ".join(str(max(0, value or 0) + i) for i in range(4))
    if axis == "scheduler":
        return ", ".join(dict.fromkeys([str(value), "ddim", "euler", "dpm++2m"]))
    fixed = {"steps": "5, 10, 20", "guidance_scale": "1, 2, 4"}
    return fixed.get(axis) or ("" if value is None else " ".join(str(value).splitlines()) + "\n")


def _axes(typed: Sequence[tuple[Any, Any]]) -> Axes:
    return Axes(*(Axis.parse(name, values) if name else None for name, values in typed))


def _title(typed: Sequence[tuple[str, str]]) -> str:
    try:
        axes = _axes(typed)
    except PROBLEMS:  # Generate reports the problem
        return f"{_TITLE}: incomplete"
    count = number_of_pictures(axes.columns * axes.rows)
    return f"{_TITLE}: {axes.columns} x {axes.rows} = {count}" if axes else _TITLE
