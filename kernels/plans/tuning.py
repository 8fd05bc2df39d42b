"""Tuning tables: the tiles, warps and stages that `fastdiff tune` found for a card.

`fastdiff tune` writes one file per card, such as `nvidia-h200.json`, to `$FASTDIFF_TABLES` (default:
`~/.cache/fastdiff/tables`). Without a table for its card, an operation uses its built-in rules.

A table does not affect any bit. It chooses among the candidates that an operation offers, none of which changes the
order of a sum; entries that are not candidates are ignored. A table made with another version of Triton or with other
kernels is not used, because its choices were checked only with those.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastdiff.kernels.host.lazy_triton import triton

VARIABLE = "FASTDIFF_TABLES"

T = TypeVar("T", bound=tuple)
Choices = Mapping[str, Mapping[str, list[Any]]]  # operation -> shape -> the fields of a candidate


@dataclass(frozen=True)
class Table:
    """The choices for a card."""

    source: str  # where the tiles come from, for reports
    choices: Choices = field(default_factory=dict)

    def choose(self, operation: str, shape: str, usual: T, candidates: Callable[[], Iterable[T]]) -> T:
        """Return the candidate that the table names for this shape, otherwise the usual one."""
        chosen = self.choices.get(operation, {}).get(shape)
        if chosen is None:
            return usual
        return next((candidate for candidate in candidates() if list(candidate) == chosen), usual)


_table: ContextVar[Table | None] = ContextVar("table", default=None)


@contextmanager
def using(table: Table) -> Iterator[None]:
    """Make operations on every card use this table inside the block."""
    token = _table.set(table)
    try:
        yield
    finally:
        _table.reset(token)


def table_in_use() -> str | None:
    """Return the source of the table of the innermost `using`; None outside of it."""
    table = _table.get()
    return None if table is None else table.source


def tuned(
    operation: str, device: torch.device, shape: Callable[[], str], usual: T, candidates: Callable[[], Iterable[T]]
) -> T:
    """Return the choice of the device's table for an operation.

    Args:
        shape: returns a name of everything that affects the kernel and the time of this call.
        usual: the choice without a table.
        candidates: returns the choices that give the same bits.
    """
    table = current(device)
    return usual if table is NO_TABLE else table.choose(operation, shape(), usual, candidates)


RULES = "the built-in rules"
NO_TABLE = Table(RULES)


def current(device: torch.device) -> Table:
    """Return the table that operations on the device use."""
    return _table.get() or _table_of(device)


@functools.cache
def _table_of(device: torch.device) -> Table:
    return card_table(torch.cuda.get_device_name(device)) if device.type == "cuda" else NO_TABLE


def card_table(card: str) -> Table:
    """Return the table of the card with this name."""
    file = user_folder() / file_name(card)
    return read_table(file) if file.is_file() else NO_TABLE


def read_table(file: Path) -> Table:
    """Read a table. A table that cannot be used has no choices, and its `source` says why."""
    content, problem = read_content(file)
    if problem:
        return Table(f"{RULES}; {problem}")
    return Table(str(file), content["choices"]) if any(content["choices"].values()) else NO_TABLE


def read_content(file: Path) -> tuple[dict[str, Any], str]:
    """Return the content of a table's file, and why it must not be used ("" if it may)."""
    try:
        content = json.loads(file.read_text())
        made_with = content["triton"]
        choices = [choice for of_shapes in content["choices"].values() for choice in of_shapes.values()]
        usable = all(isinstance(choice, list) for choice in choices)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        usable = False
    if not usable:
        return {}, f"{file} is not a tuning table"
    if made_with != triton.__version__:
        return {}, f"{file} was made with Triton {made_with}, not {triton.__version__}"
    if content.get("kernels") != kernels_digest():
        return {}, f"{file} was made with other kernels"
    return content, ""


@functools.cache
def kernels_digest() -> str:
    """Return a short hash of the source code of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def user_folder() -> Path:
    """Return the folder of the user's tables."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(VARIABLE) or Path(cache, "fastdiff", "tables"))


def file_name(card: str) -> str:
    """Return the file name of a card's table: NVIDIA H200 -> nvidia-h200.json."""
    return "-".join("".join(c if c.isalnum() else " " for c in card.lower()).split()) + ".json"


def named(*parts: Any, **given: Any) -> str:
    """Return the name of a shape: its `parts`, then the names of the `given` arguments. None is left out of both."""
    words = [str(part).removeprefix("torch.") for part in parts if part is not None]
    return " ".join(words + [name for name, value in given.items() if value is not None])
