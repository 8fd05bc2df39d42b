"""The faster CPU functions: compared with torch in float64, and used only on request."""

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.conv2d import conv2d
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans.choices import CHOICES
from fastdiff.kernels.plans.cpu import fast_on_cpu, normalised
from tests.kernels.test_conv2d import by_torch as conv2d_by_torch
from tests.kernels.test_group_norm import by_torch as group_norm_by_torch
from tests.support.accuracy import CAPS, peer_and_truth

SEED = 0
LEAST = next(row.facts["multiplications"].start for row in CHOICES.rows if row.operation == "product")
CONVOLUTION, NORM = "mkldnn_convolution", "native_group_norm"


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(SEED)
    return lambda *shape: torch.randn(shape, generator=generator)


@pytest.fixture
def calls(monkeypatch):
    """Record which fast torch functions are called. Their bits may equal the usual function's."""
    made = []

    def noting(name):
        function = getattr(torch, name)

        def noted(*args):
            made.append(name)
            return function(*args)

        return noted

    for name in (CONVOLUTION, NORM):
        monkeypatch.setattr(torch, name, noting(name))
    return made


def assert_accurate(y, torchs, truth):
    """Assert that y is about as accurate as torch's own function."""
    assert y.is_contiguous() and y.dtype == torch.float32
    off, torchs_off = ((each - truth).abs().max().item() for each in (y, torchs))
    assert off <= min(2 * torchs_off + 1e-6 * truth.abs().max().item(), CAPS[y.dtype] * truth.abs().max().item())


def test_linear(randn, calls):
    x, weight, bias = randn(2, 100, 500), randn(100, 500), randn(100)
    assert x.numel() * len(weight) >= LEAST
    usual = linear.reference(x, weight, bias)
    assert not calls
    with fast_on_cpu():
        y = linear.reference(x, weight, bias)
        assert calls == [CONVOLUTION]
        few = linear.reference(x[:, :2], weight, bias)
    judged = peer_and_truth(F.linear, x.dtype, x, weight, bias)
    assert_accurate(y, *judged)
    assert_accurate(usual, *judged)
    assert calls == [CONVOLUTION] and torch.equal(few, linear.reference(x[:, :2], weight, bias))


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "padding": (0, 1, 0, 1)}, {"padding": 0}], ids=str)
@pytest.mark.parametrize("size", [(1, 5, 7), (2, 8, 8)], ids=str)
def test_conv2d_of_few_elements(randn, calls, options, size):
    x, weight, bias = randn(*size, 40), randn(24, 40, 3, 3).to(memory_format=torch.channels_last), randn(24)
    usual = conv2d.reference(x, weight, bias, **options)
    assert not calls
    with fast_on_cpu():
        y = conv2d.reference(x, weight, bias, **options)
        pair = conv2d.reference((x[..., :16], x[..., 16:]), weight, bias, **options)
    assert calls == [CONVOLUTION] * 3
    judged = peer_and_truth(conv2d_by_torch, x.dtype, x, weight, bias, **options)
    for each in (usual, y, pair):
        assert_accurate(each, *judged)


@pytest.mark.parametrize("mean", [0.0, 1e3], ids="mean {:g}".format)
def test_group_norm(randn, calls, mean):
    x, weight, bias = randn(2, 9, 7, 24) + mean, randn(24), randn(24)
    options = {"eps": 1e-5, "activation": "silu"}
    usual = group_norm.reference(x, 4, weight, bias, **options)
    assert not calls
    with fast_on_cpu():
        y = group_norm.reference(x, 4, weight, bias, **options)
        pair = group_norm.reference((x[..., :10].contiguous(), x[..., 10:].contiguous()), 4, weight, bias, **options)
    assert calls == [NORM] * 2
    if mean:  # torch's own function would be inaccurate
        assert torch.equal(y, usual) and normalised(x, 4, weight, bias, 1e-5) is None
        return
    judged = peer_and_truth(group_norm_by_torch, x.dtype, x, 4, weight, bias, **options)
    assert_accurate(y, *judged)
    assert_accurate(usual, *judged)
    assert torch.equal(y, pair)


def test_group_norm_with_an_epilogue_is_the_usual_one(randn, calls):
    x, weight, bias = randn(2, 4, 4, 8), randn(8), randn(8)
    options = {"eps": 1e-5, "scale": randn(2, 8), "shift": randn(2, 8)}
    with fast_on_cpu():
        y = group_norm.reference(x, 4, weight, bias, **options)
    assert not calls and torch.equal(y, group_norm.reference(x, 4, weight, bias, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_as_they_were(randn, calls, dtype):
    x, weight = randn(1, 8, 8, 40).to(dtype), randn(24, 40, 3, 3).to(dtype)
    with fast_on_cpu():
        y = conv2d.reference(x, weight, padding=1)
    assert not calls and torch.equal(y, conv2d.reference(x, weight, padding=1))
