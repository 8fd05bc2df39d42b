"""How many pictures share a step, and what happens when memory runs out."""

import pytest
import torch

from fastdiff.diffusion.shared_steps import Company
from fastdiff.engine.limits import MOST, Limits, fitting
from fastdiff.errors import InputError
from tests.engine.requests import Held, assert_same, drawing

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


def test_after_memory_ran_out_steps_have_fewer_pictures(pipe, monkeypatch):
    """Two of four requests fit. The step of four fails once."""
    options = {"prompt": "a cat", "num_inference_steps": 4}
    expected, usual, sizes = pipe(**options, seed=1), Company.take, []

    def take(company, asked, *rest):
        sizes.append(len(asked))
        if len(asked) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(company, asked, *rest)

    monkeypatch.setattr(Company, "take", take)
    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1, output_type="latent")
        futures = [engine.submit(pipe, **options, seed=1) for _ in range(4)]
        held.gate.set()
    for future in futures:
        assert_same(future.result(), expected)
    assert sizes == [1, 4, *[2] * 10]  # eight steps, and two decodings


@pytest.mark.parametrize(
    ("taken", "pictures", "free", "expected"),
    [
        (GIB, 1, 100 * GIB, 32),  # 40 would fit
        (GIB, 1, 20 * GIB, 8),
        (2 * GIB, 2, 20 * GIB, 8),
        (GIB, 1, 19 * GIB, 4),
        (8 * GIB, 1, GIB, 1),
        (0, 1, GIB, MOST),
    ],
)
def test_memory_decides_how_many_fit(taken, pictures, free, expected):
    assert fitting(taken, pictures, free) == expected


def test_the_first_step_of_a_kind_is_measured(monkeypatch):
    """It takes 2 GiB for one picture, and 20 GiB are free afterwards, 4 of them in torch's hands."""
    calls = {
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 3 * GIB,
        "max_memory_allocated": 5 * GIB,
        "memory_reserved": 7 * GIB,
        "mem_get_info": (16 * GIB, 80 * GIB),
    }
    for name, value in calls.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    limits = Limits(None)
    assert limits.most("a", GPU) == 1 and limits.most("a", CPU) == MOST
    assert limits.measured("a", GPU, 1, lambda: "made") == "made"
    assert limits.most("a", GPU) == 4 and limits.most("b", GPU) == 1
    limits.failed("a", 3)
    assert limits.most("a", GPU) == 2
    limits.failed("a", 4)  # what failed later does not raise the limit again
    assert limits.most("a", GPU) == 2


def test_a_limit_is_never_above_the_caller_s():
    limits = Limits(4)
    limits.failed("a", 32)
    assert limits.most("a", GPU) == limits.most("b", GPU) == 4
    limits.failed("a", 1)
    assert limits.most("a", GPU) == 1


def test_an_engine_that_measures(pipe):
    options = {"prompt": "a cat", "num_inference_steps": 2}
    expected = pipe(**options)
    with drawing(max_batch=None) as engine:
        assert_same(engine.submit(pipe, **options).result(), expected)
    with pytest.raises(InputError, match="max_batch"):
        drawing(max_batch="all").__enter__()


def test_a_limit_never_grows():
    limits = Limits(16)
    for pictures in (4, 9):
        limits.failed("key", pictures)
    assert limits.most("key", CPU) == 2
