"""The functions that are the fastest on the CPU: against torch in float64, and only where they were asked for."""

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.conv2d import conv2d
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.cpu import LEAST, fast_on_cpu, normalised
from fastdiff.kernels.linear import linear

SEED = 0


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(SEED)
    return lambda *shape: torch.randn(shape, generator=generator)


def assert_accurate(y, usual, truth):
    """As near to the truth as what is made otherwise, which is not the same."""
    assert y.is_contiguous() and y.dtype == torch.float32
    assert not torch.equal(y, usual), "made in the usual way"
    off, torchs = ((each - truth).abs().max().item() for each in (y, usual))
    assert off <= 2 * torchs + 1e-6 * truth.abs().max().item()


def test_linear(randn):
    x, weight, bias = randn(2, 100, 500), randn(100, 500), randn(100)
    assert x.numel() * len(weight) >= LEAST
    usual = linear.reference(x, weight, bias)
    with fast_on_cpu():
        y = linear.reference(x, weight, bias)
        few = linear.reference(x[:, :2], weight, bias)
    assert_accurate(y, usual, F.linear(x.double(), weight.double(), bias.double()))
    assert torch.equal(few, linear.reference(x[:, :2], weight, bias))


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "padding": (0, 1, 0, 1)}, {"padding": 0}], ids=str)
@pytest.mark.parametrize("size", [(1, 5, 7), (2, 8, 8)], ids=str)
def test_conv2d_of_few_elements(randn, options, size):
    x, weight, bias = randn(*size, 40), randn(24, 40, 3, 3).to(memory_format=torch.channels_last), randn(24)
    usual = conv2d.reference(x, weight, bias, **options)
    with fast_on_cpu():
        y = conv2d.reference(x, weight, bias, **options)
        pair = conv2d.reference((x[..., :16], x[..., 16:]), weight, bias, **options)
    truth = conv2d.reference(x.double(), weight.double(), bias.double(), **options)
    assert_accurate(y, usual, truth)
    assert_accurate(pair, usual, truth)


@pytest.mark.parametrize("mean", [0.0, 1e3], ids="mean {:g}".format)
def test_group_norm(randn, mean):
    x, weight, bias = randn(2, 9, 7, 24) + mean, randn(24), randn(24)
    options = {"eps": 1e-5, "activation": "silu"}
    usual = group_norm.reference(x, 4, weight, bias, **options)
    with fast_on_cpu():
        y = group_norm.reference(x, 4, weight, bias, **options)
        pair = group_norm.reference((x[..., :10].contiguous(), x[..., 10:].contiguous()), 4, weight, bias, **options)
    truth = F.group_norm(x.double().permute(0, 3, 1, 2), 4, weight.double(), bias.double(), 1e-5)
    truth = F.silu(truth).permute(0, 2, 3, 1)
    if mean:  # where torch's own would be off
        assert torch.equal(y, usual) and normalised(x, 4, weight, bias, 1e-5) is None
    else:
        assert_accurate(y, usual, truth)
        assert torch.equal(y, pair)


def test_group_norm_with_an_epilogue_is_the_usual_one(randn):
    x, weight, bias = randn(2, 4, 4, 8), randn(8), randn(8)
    options = {"eps": 1e-5, "scale": randn(2, 8), "shift": randn(2, 8)}
    with fast_on_cpu():
        y = group_norm.reference(x, 4, weight, bias, **options)
    assert torch.equal(y, group_norm.reference(x, 4, weight, bias, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_as_they_were(randn, dtype):
    x, weight = randn(1, 8, 8, 40).to(dtype), randn(24, 40, 3, 3).to(dtype)
    with fast_on_cpu():
        y = conv2d.reference(x, weight, padding=1)
    assert torch.equal(y, conv2d.reference(x, weight, padding=1))
