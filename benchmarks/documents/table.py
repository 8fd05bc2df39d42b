"""A table of saved results in Markdown: columns, rows, and where the numbers come from."""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import code

RESULTS = Path(__file__).parents[1] / "results"
STALE = "†"
Row = Mapping[str, Any]
Cell = Callable[[Row], Any]


@dataclass(frozen=True)
class Column:
    """A column: its heading and the value of each row, a number or text."""

    heading: str
    value: Cell
    digits: int = 3  # significant digits of a number
    least_is_bold: bool = False  # compare this number with the row's other such numbers, and mark the least


@dataclass(frozen=True)
class Table:
    """A table of one results file, or of several whose rows are joined by workload.

    Attributes:
        source: the name of the file in benchmarks/results, without its suffix.
        columns: the columns after the first.
        labels: the workloads shown, each with the text of its first column. None: all workloads, as they are named.
        first: the heading of the first column.
        chosen: whether to show a row.
        joined_by: join the rows of a workload into one, whose `of` has each row by its value of this key.
    """

    source: str
    columns: Sequence[Column]
    labels: Mapping[str, str] | None = None
    first: str = "workload"
    chosen: Cell = field(default=lambda row: True)
    joined_by: str | None = None

    def markdown(self) -> str:
        """Return the table, and below it the machine, versions and commits of its rows."""
        rows = list(self._rows())
        headings = [self.first, *(column.heading for column in self.columns)]
        lines = [_line(headings), "|" + "---|" * len(headings)]
        lines += [_line([label + (f" {STALE}" if self._stale(row) else ""), *self._cells(row)]) for label, row in rows]
        measured = [each for _, row in rows for each in _parts(row)]
        return "\n".join([*lines, "", *origins(measured, any(self._stale(row) for _, row in rows))])

    def _rows(self) -> Iterable[tuple[str, Row]]:
        rows = [row for row in read(self.source) if self.chosen(row)]
        if self.joined_by is not None:
            rows = joined(rows, self.joined_by)
        if self.labels is None:
            return ((f"`{row['workload']}`", row) for row in rows)
        by_name = {row["workload"]: row for row in rows}
        return ((label, by_name[name]) for name, label in self.labels.items() if name in by_name)

    def _stale(self, row: Row) -> bool:
        return any(each.get("code") != current_code(self.source) for each in _parts(row))

    def _cells(self, row: Row) -> list[str]:
        values = [column.value(row) for column in self.columns]
        compared = [value for column, value in zip(self.columns, values, strict=True) if column.least_is_bold]
        least = min((value for value in compared if value is not None), default=None)
        cells = [shown(value, column.digits) for column, value in zip(self.columns, values, strict=True)]
        bold = [c.least_is_bold and v is not None and v == least for c, v in zip(self.columns, values, strict=True)]
        return [f"**{cell}**" if marked else cell for cell, marked in zip(cells, bold, strict=True)]


@functools.cache
def current_code(source: str) -> str | None:
    """Return the hash of today's code behind a results file."""
    return code.code_hash(source)


def read(source: str) -> list[Row]:
    """Return the rows of a results file."""
    return json.loads((RESULTS / f"{source}.json").read_text())


def joined(rows: Sequence[Row], key: str) -> list[Row]:
    """Return one row for each workload, whose `of` holds the workload's rows by their value of `key`."""
    workloads: dict[str, dict[str, Row]] = {}
    for row in rows:
        workloads.setdefault(row["workload"], {})[row[key]] = row
    return [{"workload": name, "of": of} for name, of in workloads.items()]


def _parts(row: Row) -> list[Row]:
    """Return the saved rows that a row joins, or the row itself."""
    return list(row["of"].values()) if "of" in row else [row]


def shown(value: Any, digits: int = 3) -> str:
    """Return a cell's text: a number with so many significant digits, text as it is, and nothing for None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    rounded = float(f"{value:.{digits}g}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(0, decimals)}f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def origins(rows: Sequence[Row], stale: bool) -> list[str]:
    """Return the lines that say where the rows were measured, and what the mark of a stale row means."""
    commits: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        commits.setdefault((row["gpu"], row["torch"], row["triton"], row["diffusers"]), set()).add(row["commit"])
    lines = [
        f"*{gpu}, torch {torch}, Triton {triton}, diffusers {diffusers}, commit {', '.join(sorted(found))}.*"
        for (gpu, torch, triton, diffusers), found in sorted(commits.items())
    ]
    return [*lines, *([f"*{STALE} The kernel code has changed since this row was measured.*"] if stale else [])]
