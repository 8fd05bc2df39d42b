"""A finding of `fastdiff doctor`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    text: str  # in plain English
    remedy: str = ""  # what to do about a problem; "" if there is none
    values: Mapping[str, Any] = field(default_factory=dict)  # the facts in `text` as JSON values, for bug reports

    @property
    def is_wrong(self) -> bool:
        return bool(self.remedy)

    def __str__(self) -> str:
        mark, remedy = ("!", f"; {self.remedy}") if self.is_wrong else ("", "")
        return f"{mark:<2}{self.name:<14}{self.text}{remedy}"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return {"name": self.name, "text": self.text, "remedy": self.remedy, **self.values}
