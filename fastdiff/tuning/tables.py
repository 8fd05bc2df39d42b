"""The file of a card: the table that operations read, and all measurements, with which a later run goes on."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastdiff.execution import temporaries
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.plans.tuning import Table, file_name, kernels_digest, read_content, user_folder

Place = tuple[str, str]  # operation and shape


@dataclass
class Kept:
    """Hold the content of the file of a card."""

    choices: dict[str, dict[str, list]] = field(default_factory=dict)  # operation -> shape -> what is faster than usual
    rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # of all measured shapes
    forwards: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> its times with and without the table

    def has(self, operation: str, shape: str) -> bool:
        """Whether a shape has been measured."""
        return shape in self.rows.get(operation, {})

    def table_of(self, places: Iterable[Place]) -> Table:
        """Return a table with the choices for some shapes."""
        chosen: dict[str, dict[str, list]] = {}
        for operation, shape in places:
            if shape in self.choices.get(operation, {}):
                chosen.setdefault(operation, {})[shape] = self.choices[operation][shape]
        return Table("the measured choices", chosen)


def kept(card: str) -> Kept:
    """Return what the file of a card holds; nothing if it is missing, or if `refused` says why it cannot be used."""
    content, problem = read_content(table_of(card))
    if problem:
        return Kept()
    try:
        nested = ("choices", "rows")
        parts: Any = {name: {each: dict(content[name][each]) for each in content[name]} for name in nested}
        forwards = {name: dict(facts) for name, facts in content["forwards"].items()}
        return Kept(forwards=forwards, **parts)
    except (LookupError, TypeError, ValueError, AttributeError):  # edited by hand
        return Kept()


def refused(card: str) -> str:
    """Return why the file of a card cannot be gone on with; "" if it can, or if there is none."""
    file = table_of(card)
    return read_content(file)[1] if file.exists() else ""


def keep(card: str, row: dict[str, Any]) -> None:
    """Write a result row to the file of a card. Its choice, if any, replaces the shape's old entry.

    Everything else in the file stays, if it was made with this Triton and these kernels. Raises OSError, with a
    one-line message, if the file cannot be written.
    """
    found, shape = kept(card), row["shape"]
    choices = found.choices.setdefault(row["operation"], {})
    choices.pop(shape, None)
    if row["choice"] is not None:
        choices[shape] = row["choice"]
    facts = ("workload", "usual_ms", "best_ms")
    found.rows.setdefault(row["operation"], {})[shape] = {name: row[name] for name in facts}
    _write(card, found)


def keep_forward(card: str, name: str, facts: dict[str, Any], dropped: Iterable[Place]) -> None:
    """Write the times of a forward to the file of a card, and drop some choices. Raises as `keep`."""
    found = kept(card)
    for operation, shape in dropped:
        found.choices[operation].pop(shape)
    found.forwards[name] = facts
    _write(card, found)


def _write(card: str, found: Kept) -> None:
    file, versions = table_of(card), {"torch": torch.__version__, "triton": triton.__version__}
    content = {"gpu": card, **versions, "kernels": kernels_digest(), **asdict(found)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporaries.remove_abandoned(file.parent)
        with temporaries.holding(file.parent, (json.dumps(content, indent=1) + "\n").encode()) as temporary:
            os.replace(temporary, file)
    except OSError as error:
        remedy = "make room, or set FASTDIFF_TABLES to another folder"
        raise OSError(f"cannot write the table {file} ({error.strerror}); {remedy}") from None


def table_of(card: str) -> Path:
    """Return the path of a card's table."""
    return user_folder() / file_name(card)
