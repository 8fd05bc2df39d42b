"""The rows that cover a product hold every pair of values, and there are few of them."""

import itertools

import pytest

from tests.support.pairwise import combinations, cover, each_option, product


@pytest.mark.parametrize("sizes", [(3,), (3, 4), (3, 4, 2), (2, 2, 2, 2), (5, 3, 3, 2)], ids=str)
def test_every_pair_is_in_a_row(sizes):
    rows = list(itertools.product(*map(range, sizes)))
    chosen = [rows[i] for i in cover(map(combinations, rows))]
    for i, j in itertools.combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in chosen} == set(itertools.product(range(sizes[i]), range(sizes[j])))
    assert len(chosen) <= 1.5 * sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


def test_every_value_is_in_a_row():
    rows = list(itertools.product(range(3), range(4), range(2)))
    chosen = [rows[i] for i in cover(combinations(row, 1) for row in rows)]
    assert len(chosen) == 4 and [len(set(column)) for column in zip(*chosen, strict=True)] == [3, 4, 2]


def test_kinds_of_rows_take_turns():
    rows = [(i, kind) for i in range(6) for kind in "abc"]
    chosen = cover([{i} for i, _ in rows], [kind for _, kind in rows])
    assert sorted(rows[i][1] for i in chosen) == ["a", "a", "b", "b", "c", "c"]


def test_values_of_shorter_axes_take_turns():
    fast = [param for param in product("abcdef", [2, 5], together=1) if not param.marks]
    assert len(fast) == 6 and sorted(param.values[1] for param in fast) == [2, 2, 2, 5, 5, 5]


def test_rows_that_are_left_out_are_slow():
    gpu = pytest.param(3, marks=pytest.mark.gpu, id="large")
    params = product({"a": 1, "b": 2, "large": gpu}, "xy", [int, str])
    assert [len(param.values) for param in params] == [3] * 12 and params[0].id == "a-x-int"
    marks = {param.id: [mark.name for mark in param.marks] for param in params}
    assert all(names == ["gpu"] for name, names in marks.items() if name.startswith("large"))
    ours = [names for name, names in marks.items() if not name.startswith("large")]
    assert sum(not names for names in ours) == 4 and sum(names == ["slow"] for names in ours) == 4


def test_the_first_case_of_each_option_is_quick():
    cases = {"plain": {}, "a": {"a": 1}, "other-a": {"a": 2}, "a-and-b": {"a": 1, "b": 2}, "b": ({}, {"b": 3})}
    cases |= {"its-a": ("its", {"a": 1}), "its-other-a": ("its", {"a": 2})}
    slow = [param.id for param in each_option(cases) if param.marks]
    assert [param.values[0] for param in each_option(cases)] == list(cases)
    assert slow == ["other-a", "b", "its-other-a"]
