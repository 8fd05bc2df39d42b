"""Comparisons with diffusers: the tolerance, and the report about a model."""

import math

import pytest

from fastdiff.errors import InputError
from fastdiff.requests.request import Request
from fastdiff.verification import comparisons, models
from fastdiff.verification.comparisons import Comparison, Verification


@pytest.mark.parametrize(
    ("error", "largest", "passed"),
    [(1e-4, 0.5, True), (1.1e-4, 1.0, False), (4e-4, 5.0, True), (math.nan, math.nan, False), (math.inf, 1.0, False)],
    ids=["absolute", "over", "relative-to-large-outputs", "nan", "infinity"],
)
def test_tolerance(error, largest, passed):
    assert Comparison("", error, largest, tolerance=1e-4).passed is passed


def test_one_comparison_out_of_tolerance_fails_the_model():
    good, bad = Comparison("a", 0.0, 1.0, 1e-4), Comparison("b", 2e-4, 1.0, 1e-4)
    assert Verification("m", "cpu", {}, [good, good]).passed
    failed = Verification("m", "cpu", {"diffusers": "0"}, [good, bad])
    assert not failed.passed
    assert failed.as_dict() == {
        "model": "m",
        "device": "cpu",
        "versions": {"diffusers": "0"},
        "passed": False,
        "comparisons": [
            {"what": "a", "error": 0.0, "largest": 1.0, "tolerance": 1e-4, "allowed": 1e-4, "passed": True},
            {"what": "b", "error": 2e-4, "largest": 1.0, "tolerance": 1e-4, "allowed": 1e-4, "passed": False},
        ],
    }


def test_a_model_that_cannot_be_sampled_is_refused_before_diffusers_is_imported(monkeypatch):
    monkeypatch.setattr(comparisons, "import_diffusers", lambda purpose: pytest.fail("imported"))
    with pytest.raises(InputError, match="steps 1001: emoji64 was trained with 1000 steps"):
        models.compare_with_diffusers(Request(model="emoji64", num_inference_steps=1001), "cpu")
