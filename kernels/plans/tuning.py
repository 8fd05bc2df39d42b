"""Tables of tiles, warps and stages: a file a card, which `fastdiff tune` writes and operations read.

They are in `$FASTDIFF_TABLES`, by default in `~/.cache/fastdiff/tables`: `nvidia-h200.json`. Without a table of its
card an operation chooses by its own rules. A table changes no bit: it chooses among the candidates that an operation
itself names, which differ in nothing that orders a sum, and an entry that is none of them is ignored. A table made with
another version of Triton is not used, as its choices were proven with that one alone.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastdiff.kernels.device.language import triton

VARIABLE = "FASTDIFF_TABLES"

T = TypeVar("T", bound=tuple)
Choices = Mapping[str, Mapping[str, list[Any]]]  # operation -> shape -> the fields of a candidate


@dataclass(frozen=True)
class Table:
    """The choices for a card."""

    source: str  # by what tiles are chosen, in words
    choices: Choices = field(default_factory=dict)

    def choose(self, operation: str, shape: str, usual: T, candidates: Callable[[], Iterable[T]]) -> T:
        """The candidate that the table names for this shape, else the usual one."""
        chosen = self.choices.get(operation, {}).get(shape)
        if chosen is None:
            return usual
        return next((candidate for candidate in candidates() if list(candidate) == chosen), usual)


_table: ContextVar[Table | None] = ContextVar("table", default=None)


@contextmanager
def using(table: Table) -> Iterator[None]:
    """Have operations ask this table inside the block, whatever their card."""
    token = _table.set(table)
    try:
        yield
    finally:
        _table.reset(token)


def tuned(
    operation: str, device: torch.device, shape: Callable[[], str], usual: T, candidates: Callable[[], Iterable[T]]
) -> T:
    """Return what the table of the device chooses for an operation.

    Args:
        shape: names all that decides the kernel and the time of this call.
        usual: the choice without a table.
        candidates: others that give the same bits.
    """
    table = current(device)
    return usual if table is NO_TABLE else table.choose(operation, shape(), usual, candidates)


RULES = "the rules built in"
NO_TABLE = Table(RULES)


def current(device: torch.device) -> Table:
    """The table that operations on the device ask."""
    return _table.get() or _table_of(device)


@functools.cache
def _table_of(device: torch.device) -> Table:
    return card_table(torch.cuda.get_device_name(device)) if device.type == "cuda" else NO_TABLE


def card_table(card: str) -> Table:
    """The table of a card by its name."""
    file = user_folder() / file_name(card)
    return read_table(file) if file.is_file() else NO_TABLE


def read_table(file: Path) -> Table:
    """Read a table. One that cannot be used chooses nothing, and its `source` says why."""
    try:
        content = json.loads(file.read_text())
        made_with, choices = content["triton"], content["choices"]
        usable = all(isinstance(chosen, list) for shapes in choices.values() for chosen in shapes.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        usable = False
    if not usable:
        return Table(f"{RULES}; {file} is no table")
    if made_with != triton.__version__:
        return Table(f"{RULES}; {file} is of Triton {made_with}, not {triton.__version__}")
    return Table(str(file), choices)


def user_folder() -> Path:
    """The folder of the tables that a user made."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(VARIABLE) or Path(cache, "fastdiff", "tables"))


def file_name(card: str) -> str:
    """The name of the file of a card's table: NVIDIA H200 -> nvidia-h200.json."""
    return "-".join("".join(c if c.isalnum() else " " for c in card.lower()).split()) + ".json"


def named(*parts: Any, **given: Any) -> str:
    """The name of a shape: its numbers and words but None, then the names of what is given and not None."""
    words = [str(part).removeprefix("torch.") for part in parts if part is not None]
    return " ".join(words + [name for name, value in given.items() if value is not None])
