"""The shapes found in a forward."""

import torch

from fastdiff.kernels.host.recording import Recorder
from fastdiff.tuning import shapes
from tests.tuning.doubling import FAST, USUAL, doubling, quadrupling, shape_of


def test_a_shape_belongs_to_the_innermost_call(tunes):
    x = torch.randn(8)
    inner, outer = shapes.shapes_of(lambda: quadrupling(x))
    assert (inner.operation, outer.operation) == ("doubling", "quadrupling")
    assert torch.equal(inner.run(), 2 * x) and torch.equal(outer.run(), 4 * x)


def test_a_shape_is_met_once(tunes):
    x = torch.randn(8)
    assert isinstance(shapes.Asked(), Recorder)
    found = shapes.shapes_of(lambda: (doubling(x), doubling(x), doubling(torch.randn(4))))
    assert [(each.operation, each.name) for each in found] == [("doubling", "8"), ("doubling", "4")]
    assert [each.lookups for each in found] == [2, 1]
    assert torch.equal(found[0].run(), 2 * x)


def test_the_usual_choice_is_the_first_candidate_and_the_others_follow(tunes):
    assert shape_of(torch.randn(8)).candidates[:2] == [USUAL, FAST]


def test_an_operation_takes_the_candidate_inside_the_block_alone(tunes):
    x = torch.randn(8)
    found = shape_of(x)
    with found.choosing(("other", 4)):
        assert not torch.equal(doubling(x), 2 * x)
    assert torch.equal(doubling(x), 2 * x)
