"""CUDA graphs of functions: arguments with several tensors, and the same bits."""

import gc
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastdiff.execution.memory import is_out_of_memory
from fastdiff.execution.replaying.cuda_graphs import CAPACITY, Graphed, without_garbage_collection
from fastdiff.execution.replaying.trees import map_tensors


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_trees_keep_their_shape():
    tree = (torch.tensor(1), Pair(torch.tensor(2), torch.tensor(3)))
    doubled = map_tensors(lambda x: 2 * x, tree)
    assert isinstance(doubled[1], Pair)
    assert (int(doubled[0]), int(doubled[1].first), int(doubled[1].second)) == (2, 4, 6)
    added = map_tensors(torch.add, tree, doubled)
    assert int(added[1].second) == 9


def test_trees_of_several_shapes_are_refused():
    pair = Pair(torch.tensor(1), torch.tensor(2))
    with pytest.raises(ValueError, match="longer"):
        map_tensors(torch.add, pair, (*pair, torch.tensor(3)))


def test_garbage_collection_goes_on_as_before():
    for is_enabled, switch in ((False, gc.disable), (True, gc.enable)):
        switch()
        with pytest.raises(ZeroDivisionError), without_garbage_collection():
            assert not gc.isenabled()
            1 / 0  # noqa: B018
        assert gc.isenabled() == is_enabled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGraphs:
    @staticmethod
    def function(x, pair, noise=None):
        y = x * pair.first + pair.second
        return y if noise is None else y + noise, Pair(y, x)

    def test_a_value_of_several_tensors_is_one_argument(self):
        graphed = Graphed(self.function)
        for seed in range(4):  # eager, captured, replayed twice
            torch.manual_seed(seed)
            x, first, second, noise = torch.randn(4, 5, 3, device="cuda").mT  # not contiguous
            for given in ((x, Pair(first, second)), (x, Pair(first, second), noise)):
                found, expected = graphed(*given), self.function(*given)
                assert torch.equal(found[0], expected[0])
                assert isinstance(found[1], Pair)
                assert torch.equal(found[1].first, expected[1].first)
        assert len(graphed._graphs) == 2

    def test_the_least_recently_used_graph_goes_first(self):
        graphed = Graphed(self.function)
        for n in [*range(1, CAPACITY + 1), 1, CAPACITY + 1]:
            x = torch.randn(n, device="cuda")
            graphed(x, Pair(x, x))
        assert len(graphed._graphs) == CAPACITY
        assert sorted(key[0][0][0] for key in graphed._graphs) == [1, *range(3, CAPACITY + 2)]

    def test_a_capture_that_runs_out_of_memory_leaves_nothing_behind(self):
        fits = False

        def function(x):
            y = x + 1
            if torch.cuda.is_current_stream_capturing() and not fits:
                y = y + torch.empty(2**50, device="cuda")
            return (y * x,)

        graphed, x = Graphed(function), torch.randn(1000, device="cuda")
        stream = torch.cuda.current_stream()
        (expected,) = graphed(x)
        for _ in range(2):
            with pytest.raises(RuntimeError) as error:
                graphed(x)
            assert is_out_of_memory(error.value)
            assert torch.cuda.current_stream() == stream
        fits = True
        for _ in range(2):  # captured, replayed
            (found,) = graphed(x)
            assert torch.equal(found, expected)
        torch.cuda.synchronize()

    def test_a_capture_outlives_a_model_that_is_gone(self):
        gone = [Graphed(self.function)]

        def function(x):
            if torch.cuda.is_current_stream_capturing():
                loop = [gone.pop()]
                loop.append(loop)
                del loop
                _ = [[] for _ in range(10_000)]  # enough objects for a collection
            return (x + 1,)

        x = torch.randn(1000, device="cuda")
        for _ in range(2):
            gone[0](x, Pair(x, x))
        graphed = Graphed(function)
        for _ in range(3):  # eager, captured, replayed
            assert torch.equal(*graphed(x), x + 1)
        assert gc.isenabled()
