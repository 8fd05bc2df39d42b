"""A finding of `fastdiff doctor`: one thing that was looked at."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    text: str  # in plain English
    remedy: str = ""  # where something is wrong: what to do
    values: Mapping[str, Any] = field(default_factory=dict)  # the same as JSON values, for bug reports

    @property
    def is_wrong(self) -> bool:
        return bool(self.remedy)

    def __str__(self) -> str:
        mark, remedy = ("!", f"; {self.remedy}") if self.is_wrong else ("", "")
        return f"{mark:<2}{self.name:<14}{self.text}{remedy}"

    def as_dict(self) -> dict[str, Any]:
        """The finding, for JSON."""
        return {"name": self.name, "text": self.text, "remedy": self.remedy, **self.values}
