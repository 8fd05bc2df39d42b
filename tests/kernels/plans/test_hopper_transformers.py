"""The sm_90 attention and matrix products without a card: their kernels emulated on the CPU, and their tiles."""

import os

import pytest
import torch

from fastdiff.kernels.attention import attention
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host import launching
from fastdiff.kernels.host.weights import FP8, INT8, quantise
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import choices, hopper_attention, hopper_linear
from fastdiff.kernels.swiglu import swiglu
from fastdiff.kernels.to_fp8 import to_fp8
from tests.kernels import test_geglu, test_swiglu
from tests.kernels import test_linear as products
from tests.kernels.plans.emulated_gluon import emulated
from tests.kernels.test_attention import exact
from tests.kernels.test_to_fp8 import dequantised
from tests.support.accuracy import in_dtype
from tests.support.pairwise import product

pytest.importorskip("triton", reason="no Triton here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the emulation does not use the interpreter", allow_module_level=True)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


ATTENTIONS = {  # N, queries, keys, heads, width
    "N2-L200-h2-d72-odd": (2, 200, 200, 2, 72),
    "N1-L400-keys1100-h2-d40-odd": (1, 400, 1100, 2, 40),
    "N1-L513-keys1024-h1-d64-odd": (1, 513, 1024, 1, 64),
    "N1-L100-keys8200-h1-d64-not-persistent": (1, 100, 8200, 1, 64),
    "N2-L130-keys300-h2-d80-odd": (2, 130, 300, 2, 80),
    "N2-L300-keys13-h1-d80-one-block": (2, 300, 13, 1, 80),
    "N2-L130-keys99-h1-d160-odd": (2, 130, 99, 1, 160),
    "N2-L250-h1-d256-odd": (2, 250, 250, 1, 256),
}


WAYS = {"1-full": (1, "full"), "40-full": (40, "full"), "1-causal": (1, "causal"), "3-bias": (3, "bias")}


@pytest.mark.parametrize(("shape", "way"), product(ATTENTIONS, WAYS, together=1))
def test_attention_emulated(shape, way, monkeypatch):
    multiprocessors, option = way
    monkeypatch.setattr(hopper_attention, "launch", emulated("hopper_attention_kernel", "attention_loads", "attention"))
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", multiprocessors)
    n, queries, keys, heads, width = shape
    q, kv = numbers(n, queries, 3 * heads * width), numbers(n, keys, 2 * heads * width)
    q, k, v = q[..., : heads * width], *kv.chunk(2, dim=-1)
    bias = torch.linspace(-2, 2, n * keys).view(n, keys).half() if option == "bias" else None
    y = attention.hopper(q, k, v, heads=heads, causal=option == "causal", bias=bias)
    truth = exact(q, k, v, heads, option == "causal", bias)
    torch.testing.assert_close(y.double(), truth, rtol=1e-3, atol=1e-5)


LENGTHS = {  # queries, keys, width, the keys of each picture
    "keys1100-d128-three-lengths": (70, 1100, 128, (1100, 1030, 5)),
    "keys1024-d104-whole-blocks": (200, 1024, 104, (1024, 896, 1000)),
}


@pytest.mark.parametrize(("case", "causal", "multiprocessors"), product(LENGTHS, (False, True), (1, 40), together=1))
def test_attention_with_lengths_emulated(case, causal, multiprocessors, monkeypatch):
    """Keys and values after a picture's own are NaN. The work of a program differs from tile to tile."""
    monkeypatch.setattr(hopper_attention, "launch", emulated("hopper_attention_kernel", "attention_loads", "attention"))
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", multiprocessors)
    queries, keys, width, lengths = case
    q, kv = numbers(len(lengths), queries, 2 * width), numbers(len(lengths), keys, 4 * width)
    for row, length in zip(kv, lengths, strict=True):
        row[length:] = torch.nan
    k, v = kv.chunk(2, dim=-1)
    options = {"heads": 2, "causal": causal}
    y = attention.hopper(q, k, v, lengths=torch.tensor(lengths, dtype=torch.int32), **options)
    for i, length in enumerate(lengths):
        own = q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length]
        torch.testing.assert_close(y[i : i + 1].double(), exact(*own, *options.values()), rtol=1e-3, atol=1e-5)


def test_causal_scores_far_below_zero_emulated(monkeypatch):
    """Masked keys must not affect the maximum. These scores are rounded by 1/8."""
    monkeypatch.setattr(hopper_attention, "launch", emulated("hopper_attention_kernel", "attention_loads", "attention"))
    q, k, v = (numbers(1, 150, 144) for _ in range(3))
    q, k = 130 + q, -130 + k
    y = attention.hopper(q, k, v, heads=2, causal=True)
    torch.testing.assert_close(y.double(), exact(q, k, v, 2, causal=True), rtol=0, atol=0.1)


@pytest.mark.parametrize("hidden", [-1e4, torch.finfo(torch.bfloat16).min], ids=["-1e4", "least"])
def test_keys_hidden_by_their_bias_emulated(hidden, monkeypatch):
    """The bias hides all keys but nine, so whole blocks are hidden, starting with the first block to be processed."""
    monkeypatch.setattr(hopper_attention, "launch", emulated("hopper_attention_kernel", "attention_loads", "attention"))
    q, k, v = (numbers(1, length, 160).bfloat16() for length in (70, 300, 301))
    v = v[:, 1:]
    bias = torch.full((1, 300), hidden, dtype=torch.bfloat16)
    bias[:, :9] = 0
    y = attention.hopper(q, k, v, heads=2, bias=bias)
    torch.testing.assert_close(y.double(), exact(q, k[:, :9], v[:, :9], 2), rtol=1e-2, atol=1e-4)


MULTIPROCESSORS = 1, 4, 40
ADDED = "bias", "residual", "nothing"


@pytest.fixture
def emulator(monkeypatch):
    """Emulate products on a card with a given number of multiprocessors. Few of them take several tiles each."""
    monkeypatch.setattr(hopper_linear, "launch", emulated("hopper_linear_kernel", "linear_loads", "linear"))
    monkeypatch.setattr(hopper_linear, "NARROW", {False: 1, True: 1})
    return lambda number: monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", number)


def additions(added: str, n: int, tokens: int, out_channels: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the bias and the residual of a product. At most one is not None."""
    bias = numbers(out_channels) if added == "bias" else None
    return bias, numbers(n, tokens, out_channels) if added == "residual" else None


LINEARS = {  # N, tokens, input and output channels, activation
    "N2-L100-C200-odd": (2, 100, 200, 96, "gelu_tanh"),
    "N1-L300-C72-two-products": (1, 300, 72, 144, "silu"),
    "N3-L1-C1096-time-embedding": (3, 1, 1096, 128, None),
    "N2-L200-C400-part-of-a-tile": (2, 200, 400, 392, None),
    "N5-L128-C64-one-step": (5, 128, 64, 256, None),
}


@pytest.mark.parametrize(("case", "added", "multiprocessors"), product(LINEARS, ADDED, MULTIPROCESSORS))
def test_linear_emulated(case, added, multiprocessors, emulator):
    emulator(multiprocessors)
    n, tokens, channels, out_channels, activation = case
    x, weight = numbers(n, tokens, channels), numbers(out_channels, channels) * channels**-0.5
    bias, residual = additions(added, n, tokens, out_channels)
    y = linear.hopper(x, weight, bias, activation=activation, residual=residual)
    truth = products.truth((x, weight, bias), {"activation": activation, "residual": residual})
    torch.testing.assert_close(y.double(), truth, rtol=1e-3, atol=1e-4)


FP8_LINEARS = {  # N, tokens, input and output channels, activation
    "N2-L100-C208-odd": (2, 100, 208, 96, "gelu_tanh"),
    "N1-L300-C16-two-products": (1, 300, 16, 144, "silu"),
    "N3-L1-C1040-time-embedding": (3, 1, 1040, 128, None),
    "N2-L200-C400-apart": (2, 200, 400, 1016, None),
    "N3-L120-C528-several-tiles-of-more-steps-than-stages": (3, 120, 528, 600, None),
    "N5-L128-C128-one-step": (5, 128, 128, 256, None),
}


@pytest.mark.parametrize(("case", "added", "multiprocessors"), product(FP8_LINEARS, ADDED, MULTIPROCESSORS))
def test_linear_in_fp8_emulated(case, added, multiprocessors, emulator):
    emulator(multiprocessors)
    n, tokens, channels, out_channels, activation = case
    (x,), weight = to_fp8(numbers(n, tokens, channels)), quantise(numbers(out_channels, channels), FP8)
    bias, residual = additions(added, n, tokens, out_channels)
    y = linear.hopper(x, weight, bias, activation=activation, residual=residual)
    x, weight = (each.dequantised(torch.float32) for each in (x, weight))
    truth = products.truth((x, weight, bias), {"activation": activation, "residual": residual})
    torch.testing.assert_close(y.double(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("added", "multiprocessors"), product(ADDED, MULTIPROCESSORS, together=1))
def test_linear_in_int8_emulated(added, multiprocessors, emulator, monkeypatch):
    emulator(multiprocessors)
    monkeypatch.setattr(choices, "card_of", lambda device: choices.SM_90)
    x, weight = numbers(2, 200, 208), quantise(numbers(392, 208), INT8)
    bias, residual = additions(added, 2, 200, 392)
    y = linear.hopper(x, weight, bias, activation="silu", residual=residual)
    args = x, weight.dequantised(torch.float32), bias
    truth = products.truth(args, {"activation": "silu", "residual": residual})
    torch.testing.assert_close(y.double(), truth, rtol=1e-3, atol=1e-3)


GATED = [pytest.param(geglu, test_geglu.by_torch, id="geglu"), pytest.param(swiglu, test_swiglu.by_torch, id="swiglu")]
gated = "operation", "by_torch"


@pytest.mark.parametrize((*gated, "out_channels", "multiprocessors"), product(GATED, (40, 200, 640), MULTIPROCESSORS))
def test_two_products_in_fp8_emulated(operation, by_torch, out_channels, multiprocessors, emulator):
    emulator(multiprocessors)
    x, weight, bias = numbers(2, 150, 144), quantise(numbers(2 * out_channels, 144) * 144**-0.5, FP8), None
    bias = numbers(2 * out_channels) if out_channels > 100 else None
    y = operation.hopper(x, weight, bias)
    truth = in_dtype(torch.float64, by_torch, dequantised(x), weight.dequantised(torch.float32), bias)
    torch.testing.assert_close(y.double(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    (*gated, "bias", "multiprocessors"), product(GATED, {"bias": True, "no-bias": False}, MULTIPROCESSORS)
)
def test_two_products_emulated(operation, by_torch, bias, multiprocessors, emulator):
    emulator(multiprocessors)
    x, weight, bias = numbers(2, 150, 136), numbers(400, 136) * 136**-0.5, numbers(400) if bias else None
    y = operation.hopper(x, weight, bias)
    truth = in_dtype(torch.float64, by_torch, x, weight, bias)
    torch.testing.assert_close(y.double(), truth, rtol=1e-3, atol=1e-4)
