"""Named cases that once broke something, and generated cases with fixed seeds.

`python -m tests.fuzz` continues with fresh seeds.
"""

import sys
from collections import Counter

import pytest
import torch

from tests.fuzz import cases
from tests.fuzz.cases import Case
from tests.fuzz.folders import KINDS, OF_PROMPTS
from tests.fuzz.named import adapters, calls, folders, single_files, texts
from tests.fuzz.named.making import DONE, REFUSED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the watching of a case needs Linux")
NAMED = folders.NAMED | texts.NAMED | calls.NAMED | single_files.NAMED | adapters.NAMED
COUNTS = {
    "text": 35,
    "sdxl": 60,
    "z-image": 60,
    "call": 400,
    "png": 150,
    "styles": 60,
    "syntax": 150,
    "tags": 80,
    "history": 60,
    "files": 80,
    "embeddings": 120,
    "pictures": 120,
    "loras": 120,
    "controls": 80,
    "ip_adapters": 80,
    "image_prompts": 60,
    "http": 150,
}  # cases per round (default: 100)
ROUNDS = {"text": 3, "sdxl": 2, "command": 2}  # (default: 1)


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: models this small are slower with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "start"), [(group, i) for group in cases.GROUPS for i in range(ROUNDS.get(group, 1))]
)
def test_nothing_from_outside_breaks_it(group, start):
    broken: dict[str, Case] = {}
    tried: Counter[bool] = Counter()

    def take(case: Case) -> None:
        with cases.made(case) as folder:
            outcome = cases.run(case, folder)
        tried[outcome.is_done] += 1
        broken.update({problem: case for problem in outcome.problems if problem not in broken})

    cases.explore(group, COUNTS.get(group, 100), start, take)
    assert not broken, "\n".join(f"{problem}\n    {case.to_json()}" for problem, case in broken.items())
    assert min(tried[True], tried[False]) > 5  # else the cases test nothing


def is_slow(tried: list[Case]) -> bool:
    """Return whether a named case loads more than a denoiser, or unpickles one."""
    kinds, edits = {case.kind for case in tried}, {edit[0] for case in tried for edit in case.edits}
    return "pickled" in edits or any(kind in OF_PROMPTS or KINDS[kind].companion for kind in kinds)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * is_slow(tried)) for name, (tried, _) in NAMED.items()],
)
@pytest.mark.timeout(60)
def test_named(name):
    tried, ends = NAMED[name]
    for case in tried:
        with cases.made(case) as folder:
            outcome = cases.run(case, folder)
        assert not outcome.problems, f"{case}\n{outcome.problems}"
        if ends in (DONE, REFUSED):
            assert outcome.is_done == (ends == DONE), f"{case}\n{outcome.said}"
