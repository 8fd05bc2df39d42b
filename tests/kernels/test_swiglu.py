"""swiglu compared with torch in float64: both ways of loading, and its bits."""

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.swiglu import swiglu
from tests.support.accuracy import peer_and_truth

SHAPES = {  # N, L, C_in, C_out
    "N2-L48-C64": (2, 48, 64, 128),
    "N1-L33-C128-several-tiles": (1, 33, 128, 200),
    "N2-L21-C36-odd": (2, 21, 36, 20),
    "N1-L1-C1-smallest": (1, 1, 1, 1),
    "N1-L9-C200-two-chunks-in-float32": (1, 9, 200, 24),
    "N8-L256-C1024-llama": pytest.param((8, 256, 1024, 2816), marks=pytest.mark.gpu),
}
HOPPER_SHAPES = {
    "N2-L1024-C640": (2, 1024, 640, 2560),
    "N2-L256-C1280": (2, 256, 1280, 5120),
    "N3-L177-C200-odd": (3, 177, 200, 2056),
}


@pytest.fixture
def run(runs_triton):
    """The operation; its kernel only, where Triton runs."""
    return swiglu.kernel if runs_triton else swiglu


def inputs(randn, n, tokens, channels, out_channels, dtype):
    weight = randn(2 * out_channels, channels, dtype=dtype) * channels**-0.5
    return randn(n, tokens, channels, dtype=dtype), weight, randn(2 * out_channels, dtype=dtype)


def by_torch(x, weight, bias=None):
    """Return the formula computed by torch, in the dtype of x."""
    first, second = F.linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(first) * second


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_output(randn, dot_dtype, run, loads, assert_accurate, shape, biased):
    args = inputs(randn, *shape, dot_dtype)[: 3 if biased else 2]
    torchs, truth = peer_and_truth(by_torch, dot_dtype, *args)
    for _ in range(4 if args[0].is_cuda else 1):
        y = run(*args)
        assert y.is_contiguous()
        assert_accurate(y, torchs, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", HOPPER_SHAPES.values(), ids=HOPPER_SHAPES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_on_hopper(randn, half, assert_hopper, shape):
    args = inputs(randn, *shape, half)
    assert_hopper(swiglu, by_torch, *args)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["N2-L48-C64", "N2-L21-C36-odd"])
def test_bits_do_not_depend_on_the_batch(randn, dtype, run, shape):
    x, weight, bias = inputs(randn, 64, *SHAPES[shape][1:], dtype)
    together = run(x, weight, bias)
    for n in (1, 3, 8):
        assert torch.equal(run(x[:n], weight, bias), together[:n])
    assert torch.equal(run(x[-1:], weight, bias), together[-1:])


def test_strided_tokens(randn, dot_dtype, run, loads, assert_accurate):
    x, weight, bias = inputs(randn, 2, 24, 64, 32, dot_dtype)
    wide = torch.cat([x, x], dim=-1)[..., 64:]
    assert not wide.is_contiguous()
    assert_accurate(run(wide, weight, bias), *peer_and_truth(by_torch, dot_dtype, x, weight, bias))


X = torch.zeros(2, 4, 8)
REFUSED = {
    "two-dimensions": ((X[0], torch.zeros(6, 8)), "x: expected"),
    "odd-rows": ((X, torch.zeros(5, 8)), "weight: expected"),
    "weight-of-other-channels": ((X, torch.zeros(6, 4)), "weight: expected"),
    "bias-of-one-half": ((X, torch.zeros(6, 8), torch.zeros(3)), "bias: expected"),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        swiglu(*args)
