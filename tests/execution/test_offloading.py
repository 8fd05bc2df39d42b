"""Models that are on the GPU only while they run."""

import pytest
import torch
from torch import nn

from fastdiff.execution.offloading import on_gpu

GPU = torch.device("cuda")


class Movable(nn.Linear):
    """A layer that moves to other host memory, as a stand-in for GPU memory."""

    def to(self, device):
        assert device == GPU
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()
        return self


def places(*models):
    return [parameter.data_ptr() for model in models for parameter in model.parameters()]


def test_models_are_back_as_they_were():
    model, released = Movable(3, 2), []
    before, home = model.weight.clone(), places(model)
    with on_gpu({model: lambda: released.append(places(model))}, GPU):
        there = places(model)
        assert not {*there} & {*home}
    assert places(model) == home
    assert torch.equal(model.weight, before)
    assert released == [there]  # released before the model moved back


def test_buffers_are_back_too():
    model = nn.Linear(3, 2)
    model.register_buffer("added", torch.ones(2), persistent=False)
    with on_gpu({model: lambda: None}, torch.device("meta")):
        assert model.added.is_meta
    assert torch.equal(model.added, torch.ones(2))


def test_an_error_leaves_none_behind():
    models = Movable(3, 2), Movable(2, 2)
    home = places(*models)
    with pytest.raises(RuntimeError), on_gpu({model: lambda: None for model in models}, GPU):
        raise RuntimeError
    assert places(*models) == home
