"""Fixtures that several folders of tests share."""

import pytest
import torch
from torch import nn


@pytest.fixture
def randomise():
    """Give every parameter of a model a random value that hides no error: none zero, no norm weight 1."""

    def fill(model: nn.Module, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            for module in model.modules():
                if isinstance(module, nn.GroupNorm):
                    module.weight.add_(1)
        return model.eval()

    return fill


@pytest.fixture
def exact_matmuls():
    """float32 convolutions and products of torch in float32, never TF32."""
    backends = torch.backends.cudnn, torch.backends.cuda.matmul  # the second cannot be monkeypatched back
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed
