"""The axes of an X/Y sheet: the settings that vary across its columns and rows, and their values."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from annotated_types import Len

from fastdiff.errors import InputError
from fastdiff.kinds import Label, NotNegative, Prompt, Seed, Steps
from fastdiff.sampler_names import SchedulerName
from fastdiff.schema import Schema, Wanted, checked

MAX_VALUES = 100  # of an axis
AxisName = Literal["seed", "steps", "guidance_scale", "scheduler", "label", "prompt"]  # as in UncheckedRequest
AXIS_NAMES: tuple[str, ...] = get_args(AxisName)
_KINDS: dict[str, Any] = {
    "seed": Seed,
    "steps": Steps,
    "guidance_scale": NotNegative,
    "scheduler": SchedulerName,
    "label": Annotated[Label | str, Wanted("the name or index of a label")],
    "prompt": Prompt,
}
_CAPTIONS = {"seed": "seed {}", "steps": "{} steps", "guidance_scale": "guidance {}"}
_NUMBERS = ("seed", "steps", "guidance_scale")
_Text = Annotated[str, Len(0, 2**17), Wanted("a list of values")]
_RANGE = re.compile(  # 1-5, 1-9 (+2) and 0-100 [5], as in A1111's X/Y/Z plot
    r"(?P<first>[\d.]+)\s*-\s*(?P<last>[\d.]+)\s*(?:\(\+?(?P<step>[\d.]+)\)|\[(?P<count>\d{1,9})\])?"
)


@dataclass(frozen=True)
class Axis(Schema):
    """A setting and its values, one for each column or row."""

    name: AxisName
    values: Annotated[tuple[Any, ...], Len(1, MAX_VALUES)]

    def check(self) -> None:
        """Raise InputError for an invalid value, and for a value that occurs twice."""
        values = tuple(checked(self.name, value, _KINDS[self.name]) for value in self.values)
        for value in values:
            if values.count(value) > 1:
                raise InputError(f"{self.name}: {value} is on the axis twice; remove one")
        object.__setattr__(self, "values", values)

    @classmethod
    def parse(cls, name: Any, text: Any) -> "Axis":
        """Parse typed values: numbers and ranges, names separated by commas, or one name or prompt per line."""
        text = checked(str(name), text, _Text)
        values: list[Any] = []
        if name in _NUMBERS:
            for part in filter(str.strip, re.split(r"[,\n]", text)):
                values += _numbers(name, part.strip())
        else:
            between = "\n" if name == "prompt" or "\n" in text else ","
            values = [part.strip() for part in text.split(between) if part.strip()]
        if not values:
            raise InputError(f"{name}: the axis has no values; enter some, or set the axis to None")
        return cls(name, tuple(value.lower() for value in values) if name == "scheduler" else tuple(values))

    @property
    def text(self) -> str:
        """The values as the user can type them."""
        if self.name == "prompt" or any("," in str(value) for value in self.values):
            return "\n".join(map(str, self.values)) + "\n"
        return self.words

    @property
    def words(self) -> str:
        """The values, separated by commas."""
        return ", ".join(map(_short, self.values))

    @property
    def captions(self) -> list[str]:
        """A caption for each value."""
        return [caption(self.name, value) for value in self.values]


def caption(name: str, value: Any) -> str:
    """Return the caption of a value of an axis."""
    if name == "label" and isinstance(value, int):
        return f"label {value}"
    return "1 step" if (name, value) == ("steps", 1) else _CAPTIONS.get(name, "{}").format(_short(value))


def _short(value: Any) -> str:
    """Return a value as text, without the .0 of a whole number."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _numbers(name: str, text: str) -> list[int | float]:
    """Parse a number such as `7`, or a range. Raises InputError for anything else, and for too many numbers."""
    match = _RANGE.fullmatch(text)
    if not match:
        return [_number(name, text)]
    first, last = _number(name, match["first"]), _number(name, match["last"])
    if match["count"]:
        count = int(match["count"])
        step = (last - first) / max(1, count - 1)
    else:
        step = _number(name, match["step"] or "1")
        count = math.floor((last - first) / step + 1e-6) + 1 if step > 0 else 0
    if not 0 < count <= MAX_VALUES or last < first:
        raise InputError(f"{name}: {text} is not an increasing range of at most {MAX_VALUES} numbers")
    values = [first + i * step for i in range(count)]
    return [round(value, 6) if name == "guidance_scale" else round(value) for value in values]


def _number(name: str, text: str) -> int | float:
    whole = name != "guidance_scale"
    if not re.fullmatch(r"\d{1,10}" if whole else r"(\d{1,10}\.?\d{0,20}|\.\d{1,20})(e[+-]?\d{1,2})?", text):
        wanted = "whole numbers such as 5, 10 or 1-4" if whole else "numbers such as 1, 2.5 or 1-4"
        raise InputError(f"{name}: {text[:40]!r} is not a valid value; give {wanted}")
    return int(text) if whole else float(text)


@dataclass(frozen=True)
class Axes:
    """The two axes of a sheet; a sheet without one of them has a single column or row."""

    x: Axis | None = None
    y: Axis | None = None

    def __post_init__(self) -> None:
        if self.x and self.y and self.x.name == self.y.name:
            raise InputError(f"{self.x.name} is on both axes; choose another setting for one of them")

    @classmethod
    def from_record(cls, record: Any, source: str) -> "Axes":
        """Return the axes that `as_record` wrote. Raises InputError, with the name `source`, for any other record."""
        if not isinstance(record, Mapping) or not record.keys() <= {"x", "y"}:
            raise InputError(f"{source} has invalid axes")
        axes = {}
        for name, axis in record.items():
            if not isinstance(axis, Mapping) or axis.keys() != {"name", "values"}:
                raise InputError(f"{source} has an invalid axis {name}")
            axes[name] = Axis.from_mapping(axis, f"{source}: axis {name}")
        return cls(**axes)

    def as_record(self) -> dict[str, Any]:
        """Return the axes as JSON values."""
        return {place: {"name": axis.name, "values": list(axis.values)} for place, axis in self.chosen.items()}

    def __bool__(self) -> bool:
        return bool(self.x or self.y)

    @property
    def columns(self) -> int:
        return len(self.x.values) if self.x else 1

    @property
    def rows(self) -> int:
        return len(self.y.values) if self.y else 1

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each picture, row by row."""
        across, down = (_settings(axis) for axis in (self.x, self.y))
        return [one | other for other in down for one in across]

    @property
    def chosen(self) -> dict[str, Axis]:
        """The axes that are used, by x and y."""
        return {place: axis for place, axis in (("x", self.x), ("y", self.y)) if axis}


def _settings(axis: Axis | None) -> list[dict[str, Any]]:
    return [{axis.name: value} for value in axis.values] if axis else [{}]
