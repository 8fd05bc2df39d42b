"""Cases that once broke something, and cases that nobody thought of, the same in every run.

`python -m tests.fuzz` goes on from there.
"""

import sys
from collections import Counter

import pytest
import torch

from tests.fuzz import cases
from tests.fuzz.cases import Case
from tests.fuzz.named import DONE, NAMED, REFUSED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what watches a case is Linux's")
COUNTS = {"command": 200, "call": 400, "png": 150}


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("group", cases.GROUPS)
def test_nothing_from_outside_breaks_it(group):
    broken: dict[str, Case] = {}
    tried: Counter[bool] = Counter()

    def take(case: Case) -> None:
        with cases.made(case) as folder:
            outcome = cases.run(case, folder)
        tried[outcome.is_done] += 1
        broken.update({problem: case for problem in outcome.problems if problem not in broken})

    cases.explore(group, COUNTS.get(group, 100), 0, take)
    assert not broken, "\n".join(f"{problem}\n    {case.to_json()}" for problem, case in broken.items())
    assert min(tried[True], tried[False]) > 5  # else it tries nothing


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
