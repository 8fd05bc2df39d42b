"""Products of independent axes: some rows of a product cover every pair of values, and the rest are marked slow."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Axis = Mapping[str, Any] | Iterable[Any]  # a value for each id; or values, which are their own ids; pytest.param too


def combinations(row: Sequence[Hashable], together: int = 2) -> set[Hashable]:
    """Return every `together` values of a row that stand in columns of their own; all of a shorter row as one."""
    chosen = itertools.combinations(range(len(row)), min(together, len(row)))
    return {(columns, *(row[i] for i in columns)) for columns in chosen}


def cover(rows: Iterable[set[Hashable]], kinds: Sequence[Hashable] | None = None) -> list[int]:
    """Choose rows, by their numbers, that together hold all that any row holds.

    Greedy, and always the same: the row that adds the most is next; of several the one whose kind was chosen least,
    then the first.
    """
    missing = [set(row) for row in rows]
    kinds = kinds or [None] * len(missing)
    chosen: list[int] = []
    uses: Counter[Hashable] = Counter()
    while any(missing):
        best = max(range(len(missing)), key=lambda i: (len(missing[i]), -uses[kinds[i]]))
        chosen.append(best)
        uses[kinds[best]] += 1
        held = set(missing[best])
        for each in missing:
            each -= held
    return sorted(chosen)


def product(*axes: Axis, together: int = 2) -> list[ParameterSet]:
    """Return a pytest.param for each row of the product, with its id; those beyond a cover of pairs are marked slow.

    With `together=1` every value is in a row, and those of the shorter axes take turns beside those of the longest. A
    row with a value that is marked gpu or slow keeps its marks, and covers nothing.
    """
    params = [_params(axis) for axis in axes]
    longest = max(range(len(params)), key=lambda i: len(params[i]))
    rows = list(itertools.product(*params))
    free = [row for row in rows if not any(mark.name in ("gpu", "slow") for param in row for mark in param.marks)]
    ids = [tuple(param.id for param in row) for row in free]
    kinds = [row[:longest] + row[longest + 1 :] for row in ids]
    fast = {id(free[i]) for i in cover([combinations(row, together) for row in ids], kinds)}
    slow = {id(row) for row in free} - fast
    return [
        pytest.param(
            *(value for param in row for value in param.values),
            marks=[*(mark for param in row for mark in param.marks), *([pytest.mark.slow] if id(row) in slow else [])],
            id="-".join(str(param.id) for param in row),
        )
        for row in rows
    ]


def each_option(cases: Mapping[str, Any]) -> list[ParameterSet]:
    """Return a pytest.param for each case: options by their names, or a tuple of what has them and the options.

    Cases whose every option an earlier case has are marked slow.
    """
    seen: set[tuple[str, str]] = set()
    params = []
    for name, case in cases.items():
        whose, options = case if isinstance(case, tuple) else ("", case)
        new = {(whose if isinstance(whose, str) else "", option) for option in options}
        params.append(pytest.param(name, marks=[pytest.mark.slow] if new and new <= seen else [], id=name))
        seen |= new
    return params


def _params(axis: Axis) -> list[ParameterSet]:
    named = axis.items() if isinstance(axis, Mapping) else ((_name(value), value) for value in axis)
    return [
        pytest.param(*value.values, marks=value.marks, id=value.id or name)
        if isinstance(value, ParameterSet)
        else pytest.param(value, id=name)
        for name, value in named
    ]


def _name(value: Any) -> str:
    if isinstance(value, ParameterSet):
        return str(value.id or "-".join(map(_name, value.values)))
    return getattr(value, "__name__", None) or str(value)
