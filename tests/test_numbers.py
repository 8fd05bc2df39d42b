"""The checks of numbers: bools, texts and what is not finite are none."""

import math

import pytest

from fastdiff.numbers import is_int, is_number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True),
        (5, True),
        (0, False),
        (6, False),
        (2.0, False),
        (True, False),
        ("2", False),
        (None, False),
        ([], False),
    ],
    ids=repr,
)
def test_is_int(value, expected):
    assert is_int(value, 1, 5) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((1, True), (0.5, True), (0, True), (1.5, False), (-0.1, False)),
        *((math.nan, False), (True, False), ("1", False), (None, False)),
    ],
    ids=repr,
)
def test_is_number(value, expected):
    assert is_number(value, 0, 1) == expected


def test_without_a_most_any_finite_number_will_do():
    assert is_int(10**400, 0) and is_number(1e308, 0)
    assert not is_number(math.inf, 0) and not is_number(-math.inf, -math.inf)
    assert not is_number(10**400, 0), "it is no float"
