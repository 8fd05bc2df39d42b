"""Pairwise tests: the fast rows of a product of axes cover every pair of values, and the other rows are marked slow."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from fastdiff.sampler_names import SAMPLERS

Axis = Mapping[str, Any] | Iterable[Any]  # id -> value; or values that are their own ids. A value may be a pytest.param


def combinations(row: Sequence[Hashable], together: int = 2) -> set[Hashable]:
    """Return every combination of `together` columns of a row, with their values. A shorter row is one combination."""
    chosen = itertools.combinations(range(len(row)), min(together, len(row)))
    return {(columns, *(row[i] for i in columns)) for columns in chosen}


def cover(rows: Iterable[set[Hashable]], kinds: Sequence[Hashable] | None = None) -> list[int]:
    """Return the indices of rows that together hold everything that any row holds.

    Greedy and deterministic: the next row is the one that adds the most. Between equal rows it is the one whose kind
    was chosen least, then the first.
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
    """Return a pytest.param with an id for each row of the product. Rows that the cover of pairs leaves out are slow.

    With `together=1` every value is in a fast row, and the values of the shorter axes alternate along the longest axis.
    A row with a value that is marked gpu or slow keeps its marks, and covers nothing.
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


def each_sampler() -> list[ParameterSet]:
    """Return a pytest.param for the name of each sampler. Of a class's names all but the first are slow."""
    return [
        pytest.param(name, marks=[] if place == 0 else [pytest.mark.slow], id=name)
        for sampler in SAMPLERS.values()
        for place, name in enumerate(sampler.names)
    ]


def each_option(cases: Mapping[str, Any]) -> list[ParameterSet]:
    """Return a pytest.param for each case. A case is a dict of options, or a tuple of their owner and such a dict.

    A case is marked slow if earlier cases have all its options.
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
