"""Tokens in fp8 with a scale for each 64 channels, made by the kernels of `geglu`, `swiglu` and `attention`.

A kernel that makes them gives the bits of its own 16-bit output, quantised in a pass of its own. The sm_90 kernels are
emulated on the CPU.
"""

import os

import pytest
import torch

from fastdiff.kernels.attention import attention
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host import launching
from fastdiff.kernels.host.weights import FP8, SHARE, Scaled, quantise
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import choices, hopper_attention, hopper_linear
from fastdiff.kernels.swiglu import swiglu
from fastdiff.kernels.to_fp8 import reads_shares, shares_in_fp8, to_fp8
from fastdiff.models.blocks import transformer
from fastdiff.models.blocks.transformer import BasicTransformerBlock, Context
from tests.kernels.test_linear import Case, truth

HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = {  # N, tokens, input and output channels
    "N2-L70-C144": (2, 70, 144, 128),
    "N1-L40-C64-odd-shares": (1, 40, 64, 192),
    "N3-L1-C32-one-share": (3, 1, 32, 64),
}
sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def assert_same(made: Scaled, expected: Scaled) -> None:
    assert torch.equal(made.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(made.scale, expected.scale) and made.dtype == expected.dtype


def product(randn, n, tokens, channels, out_channels, dtype):
    """Return x, an fp8 weight of two products, and a bias."""
    weight = quantise(randn(2 * out_channels, channels) * channels**-0.5, FP8)
    return randn(n, tokens, channels, dtype=dtype), weight, randn(2 * out_channels, dtype=dtype)


@pytest.fixture
def way(runs_triton):
    """The kernels only, where Triton runs; else what is chosen, the references."""
    return "kernel" if runs_triton else "__call__"


@pytest.mark.parametrize("operation", [geglu, swiglu], ids=["geglu", "swiglu"])
@sizes
def test_two_products(operation, sizes, dtype, randn, way):
    args, run = product(randn, *sizes, dtype), getattr(operation, way)
    made = run(*args, in_fp8=True)
    assert made.scale.shape == (*made.shape[:2], made.shape[2] // SHARE)
    assert_same(made, shares_in_fp8(run(*args), getattr(to_fp8, way)))


@HALVES
def test_attention(half, randn, way):
    q, k, v = (randn(2, length, 128, dtype=half) for length in (70, 90, 90))
    run = getattr(attention, way)
    made = run(q, k, v, heads=2, residual=q, in_fp8=True)
    assert_same(made, shares_in_fp8(run(q, k, v, heads=2, residual=q), getattr(to_fp8, way)))


@HALVES
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_attention_to_few_keys(half, randn):
    """This sm_90 kernel is written in Triton."""
    q, k, v = (randn(2, length, 128, dtype=half) for length in (70, 77, 77))
    made = attention.hopper(q, k, v, heads=2, in_fp8=True)
    assert_same(made, shares_in_fp8(attention.hopper(q, k, v, heads=2), to_fp8.kernel))


@sizes
def test_linear(sizes, dot_dtype, device, way):
    n, tokens, out_channels, channels = sizes
    (x, weight), options = Case(n, tokens, channels, out_channels, residual=True).inputs(dot_dtype, device)
    x, made = shares_in_fp8(x), quantise(weight, FP8)
    y = getattr(linear, way)(x, made, **options)
    exact = truth((x.dequantised(torch.float64), made.dequantised(torch.float64)), options)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-7)


def test_a_small_share_keeps_its_digits(dot_dtype, randn, way):
    """With one scale for a token, the first share is all zeros."""
    x, weight = randn(2, 9, 192, dtype=dot_dtype), randn(24, 192)
    x[..., :SHARE] *= 2**-20
    weight[:, SHARE:] = 0
    made, exact = quantise(weight, FP8), x.double() @ weight.double().T
    run = getattr(linear, way)
    assert not run(to_fp8(x)[0], made).any()
    error = run(shares_in_fp8(x), made).double() - exact
    assert error.square().mean().sqrt() <= 0.05 * exact.square().mean().sqrt()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
def test_nan_and_infinity_stay_with_their_share(randn, way):
    x = randn(1, 4, 192)
    x[0, 0, 70], x[0, 1, 70], x[0, 2] = float("nan"), float("inf"), 0.0
    y = shares_in_fp8(x, getattr(to_fp8, way)).dequantised(torch.float32)
    assert y[0, 0].isnan().nonzero().tolist() == [[70]]
    assert y[0, 1].isnan().nonzero().flatten().tolist() == list(range(64, 128))
    assert not y[0, 2].any() and y[0, 3].isfinite().all()


@pytest.fixture
def emulate(monkeypatch):
    """Emulate the sm_90 kernels on a card with a given number of multiprocessors."""
    pytest.importorskip("triton", reason="no Triton here")
    if INTERPRETED:
        pytest.skip("the emulation does not use the interpreter")
    from tests.kernels.plans.emulated_gluon import emulated

    monkeypatch.setattr(hopper_linear, "launch", emulated("hopper_linear_kernel", "linear_loads", "linear"))
    monkeypatch.setattr(hopper_attention, "launch", emulated("hopper_attention_kernel", "attention_loads", "attention"))
    monkeypatch.setattr(hopper_linear, "NARROW", {False: 1, True: 1})
    return lambda number: monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", number)


@HALVES
@pytest.mark.parametrize("multiprocessors", [1, 4, 40])
@pytest.mark.parametrize("out_channels", [192, 640])
def test_two_products_emulated(half, multiprocessors, out_channels, emulate, randn):
    emulate(multiprocessors)
    args = product(randn, 2, 150, 144, out_channels, half)
    assert_same(geglu.hopper(*args, in_fp8=True), shares_in_fp8(geglu.hopper(*args), to_fp8.reference))


@pytest.mark.parametrize("multiprocessors", [1, 4, 40])
@pytest.mark.parametrize("sizes", [(2, 150, 320, 392), (3, 40, 64, 96)], ids=str)
def test_linear_emulated(multiprocessors, sizes, emulate, randn):
    emulate(multiprocessors)
    n, tokens, channels, out_channels = sizes
    x = shares_in_fp8(randn(n, tokens, channels, dtype=torch.float16) * torch.arange(1, channels + 1).half() / 64)
    weight, residual = quantise(randn(out_channels, channels), FP8), randn(n, tokens, out_channels).half()
    y = linear.hopper(x, weight, residual=residual)
    exact = truth((x.dequantised(torch.float64), weight.dequantised(torch.float64)), {"residual": residual})
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=2e-2)


@HALVES
@pytest.mark.parametrize("multiprocessors", [1, 40])
def test_attention_emulated(half, multiprocessors, emulate, randn):
    emulate(multiprocessors)
    q, k, v = (randn(2, length, 128, dtype=half) for length in (130, 1100, 1100))
    made = attention.hopper(q, k, v, heads=2, in_fp8=True)
    assert_same(made, shares_in_fp8(attention.hopper(q, k, v, heads=2), to_fp8.reference))


def test_tiles_of_shares():
    """A part of a tile has whole shares, and warp groups share the tiles of a product that reads shares."""
    for tokens in (256, 2048, 8192, 65536):
        made = hopper_linear.cut(tokens, 5120, 132, dual=True, fp8=True, in_shares=True)
        assert all(part // 2 % SHARE == 0 for part in made.parts)
        assert not hopper_linear.cut(tokens, 5120, 132, fp8=True, of_shares=True).turns
    assert hopper_linear.cut(65536, 5120, 132, fp8=True).turns


def test_a_wrong_argument_is_named(randn):
    x, weight = torch.zeros(1, 4, 64), quantise(torch.ones(2 * 96, 64), FP8)
    with pytest.raises(ValueError, match=r"^in_fp8: give an fp8 weight whose C_out is a multiple of 64"):
        geglu(x, weight, in_fp8=True)
    with pytest.raises(ValueError, match=r"^in_fp8: give an fp8 weight"):
        geglu(x, torch.ones(128, 64), in_fp8=True)
    with pytest.raises(ValueError, match=r"^in_fp8: 96 channels are not a multiple of 64"):
        attention(*torch.zeros(3, 1, 4, 96), heads=2, in_fp8=True)


def test_only_layers_with_a_row_read_shares(monkeypatch):
    row = choices.Choice("fp8 shares", choices.ANY_CARD, {"channels": 128}, "shares", choices.UNSAVED)
    monkeypatch.setattr(choices, "CHOICES", choices.ChoiceTable([row]))
    wide, narrow = (quantise(torch.ones(8, channels), FP8) for channels in (128, 64))
    assert reads_shares(wide) and not reads_shares(narrow) and not reads_shares(torch.ones(8, 128))


@pytest.mark.parametrize("images", [0, 2], ids=["text", "ip-adapters"])
def test_a_block_makes_shares_for_the_layers_that_read_them(images, monkeypatch):
    torch.manual_seed(0)
    block = BasicTransformerBlock(64, 1, only_cross=False).eval()
    block.attn2.columns = slice(0, 128)
    for layer in (*block.attn1.to_out, *block.attn2.to_out, block.ff.reader, block.ff.net["2"]):
        weight = quantise(layer.weight.detach(), FP8)
        del layer.weight
        layer.weight = weight
    x, text = torch.randn(1, 9, 64), torch.randn(1, 5, 128)
    context = Context(torch.zeros(1, 4), text, images=(text,) * images)
    read = []

    def watched(x, *args, **kwargs):
        read.append(isinstance(x, Scaled) and x.in_shares)
        return linear(x, *args, **kwargs)

    monkeypatch.setattr(transformer, "linear", watched)
    with torch.no_grad():
        apart = block(x, context)
        assert not any(read)
        monkeypatch.setattr(transformer, "reads_shares", lambda weight: weight.dtype == FP8)
        read.clear()
        together = block(x, context)
    assert sum(read) == 3
    torch.testing.assert_close(together, apart, rtol=0.1, atol=0.1)
