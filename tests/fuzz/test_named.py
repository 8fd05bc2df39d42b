"""The cases that once broke something, each by its name."""

import pytest

from tests.fuzz import cases
from tests.fuzz.named import DONE, NAMED, REFUSED


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.timeout(60)
def test_named(name):
    tried, ends = NAMED[name]
    for case in tried:
        with cases.made(case) as folder:
            outcome = cases.run(case, folder)
        assert not outcome.problems, f"{case}\n{outcome.problems}"
        if ends in (DONE, REFUSED):
            assert outcome.is_done == (ends == DONE), f"{case}\n{outcome.said}"
