"""The fields of an X/Y sheet: the values that an axis begins with."""

import pytest

from fastdiff.ui.parts.axis_fields import _first_values


@pytest.mark.parametrize(("seed", "values"), [(7, "7, 8, 9, 10"), (-1, "0, 1, 2, 3"), (None, "0, 1, 2, 3")])
def test_an_axis_of_seeds_begins_with_the_seed_of_the_form(seed, values):
    assert _first_values("seed", seed) == values
