"""Which candidates the tuner refuses, and which candidate it chooses."""

import json

import pytest
import torch

from fastdiff.kernels.host.weights import Scaled
from fastdiff.tuning import judging
from tests.tuning.doubling import FAILING, FAST, OTHER_BITS, RACING, UNWRITTEN, USUAL, shape_of


def test_only_what_has_the_usual_bits_in_every_repeat_is_timed(tunes):
    row = judging.tune(shape_of(torch.randn(64)))
    assert row["refused"] == {
        str(list(OTHER_BITS)): "other bits",
        str(list(RACING)): "other bits",
        str(list(UNWRITTEN)): "other bits",
        str(list(FAILING)): "RuntimeError: out of resources",
    }
    assert (row["usual_ms"], row["best_ms"], row["candidates"]) == (2.0, 1.0, 7)
    assert (row["usual"], row["choice"]) == (list(USUAL), list(FAST))
    json.dumps(row)
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_a_kernel_does_not_write_is_nan(tunes):
    unwritten = shape_of(torch.randn(64))._replace(run=lambda: torch.empty(3))
    (output,) = judging.poisoned(unwritten, USUAL)
    assert output.isnan().all()


def test_a_gpu_that_fails_ends_the_tuning(tunes):
    def lose() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    shape = shape_of(torch.randn(64))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        judging.fault(shape._replace(run=lose), FAST, [])


def test_the_truth_of_8_bit_activations_is_wider(tunes):
    values = torch.randn(1, 4, 16).to(torch.float8_e4m3fn)
    given = Scaled(values, torch.full((1, 4), 0.3), torch.bfloat16)
    seen = shape_of(torch.randn(64))._replace(
        reference=lambda x, *, bias: x.dequantised(x.dtype) + bias,
        arguments=((given,), {"bias": torch.ones(16, dtype=torch.bfloat16)}),
    )
    exact = 0.3 * values.float() + 1
    assert judging._reference(seen, None).dtype == torch.bfloat16
    assert torch.allclose(judging._reference(seen, torch.float32), exact, rtol=1e-6)


@pytest.mark.parametrize("output", [float("nan"), 0.0], ids=["nan", "zeros"])
def test_a_usual_choice_that_is_wrong_is_an_error(tunes, output):
    wrong = shape_of(torch.randn(64))._replace(run=lambda: torch.full((64,), output))
    with pytest.raises(ArithmeticError, match=r"^the usual choice has an error of [\w.]+, above the allowed "):
        judging.tune(wrong)


def test_less_than_three_per_cent_is_no_gain(tunes):
    tunes[FAST] = 1.95
    assert judging.tune(shape_of(torch.randn(64)))["choice"] is None
    tunes[FAST] = 1.93
    assert judging.tune(shape_of(torch.randn(64)))["choice"] == list(FAST)


def test_a_gain_must_be_there_in_a_second_measurement(tunes, monkeypatch):
    measured = []

    def measure(calls, seconds):
        measured.append((list(calls), seconds))
        return {name: (1.0 if len(measured) == 1 else 2.0) if "fast" in name else 2.0 for name in calls}

    monkeypatch.setattr(judging.timing, "measure", measure)
    assert judging.tune(shape_of(torch.randn(64)))["choice"] is None
    assert measured[1] == ([str(USUAL), str(FAST)], 0.05)


def test_the_tensors_of_an_output(tunes):
    a, b = torch.ones(1), torch.ones(2)
    assert judging.tensors((a, (b, None, 3))) == [a, b]
