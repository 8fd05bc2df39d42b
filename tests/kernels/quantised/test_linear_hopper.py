"""Products with 8-bit weights on the sm_90 kernel: the bits of the generic kernel, and the cost of quantisation.

tests/kernels/plans/test_hopper_transformers.py has the tests that need no card.
"""

from functools import partial

import pytest
import torch

from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host.weights import FP8, INT8, quantise
from fastdiff.kernels.linear import LinearCall, linear
from fastdiff.kernels.plans import hopper_linear as on_hopper
from fastdiff.kernels.plans.choices import hopper_obstacle
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.kernels.swiglu import swiglu
from fastdiff.kernels.to_fp8 import to_fp8
from tests.kernels.plans.by_plan import by_plan
from tests.kernels.quantised.test_quantised import BY_TORCH, assert_costs_what_8_bits_cost, judged
from tests.kernels.test_linear import Case, truth
from tests.kernels.test_to_fp8 import dequantised
from tests.support.accuracy import in_dtype

NARROW = {FP8: {"narrow": dequantised}, INT8: {}}  # how x is rounded

PRODUCTS = {
    "N2-L256-C1152-fc1": Case(2, 256, 1152, 4608, activation="gelu_tanh"),
    "N2-L256-C1152-qkv": Case(2, 256, 1152, 3456),
    "N6-L77-C768-odd": Case(6, 77, 768, 3072, activation="quick_gelu"),
    "N6-L77-C80-odd-channels": Case(6, 77, 80, 4232, bias=False, activation="gelu"),
    "N3-L1001-C208-odd-several-tiles": Case(3, 1001, 208, 2040, activation="silu", residual=True),
    "N3-L2001-C16-less-than-a-step": Case(3, 2001, 16, 1016, residual=True),
    "N2-L1024-C1280-out": Case(2, 1024, 1280, 1280),
    "N2-L1024-C5120-ff2": Case(2, 1024, 5120, 1280, residual=True),
    "N2-L1024-C1280-qkv-widest": Case(2, 1024, 1280, 3840, bias=False),
    "N2-L4096-C640-qkv-apart": Case(2, 4096, 640, 1920),
    "N2-L4096-C2560-ff2": Case(2, 4096, 2560, 640, residual=True),
    "N6-L256-C1152-fc1-widest": Case(6, 256, 1152, 4608, activation="gelu_tanh"),
    "N6-L256-C1152-residual-widest": Case(6, 256, 1152, 4608, activation="gelu", residual=True),
    "N32-L256-C1152-fc1-apart": Case(32, 256, 1152, 4608, activation="gelu_tanh"),
    "N32-L256-C1152-residual-apart": Case(32, 256, 1152, 3456, activation="gelu", residual=True),
    "N3-L2001-C144-odd-apart": Case(3, 2001, 144, 2040, bias=False),
}
GATED = {  # N, tokens, input and output channels
    "N2-L256-C1152": (2, 256, 1152, 3072),
    "N2-L1024-C1280": (2, 1024, 1280, 5120),
    "N2-L4096-C640": (2, 4096, 640, 2560),
    "N3-L501-C80-odd": (3, 501, 80, 1000),
    "N7-L300-C16-odd": (7, 300, 16, 648),
    "N2-L256-C640-widest": (2, 256, 640, 3456),
    "N3-L2001-C80-odd-apart": (3, 2001, 80, 1000),
    "N2-L2500-C528-odd-apart": (2, 2500, 528, 1000),
}


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=[FP8, INT8], ids=["fp8", "int8"])
def precision(request) -> torch.dtype:
    return request.param


def skip_if_not_launched(operation: Operation, *args, **options) -> None:
    reason = hopper_obstacle(operation.parse(*args, **options))
    if reason is not None:
        pytest.skip(reason)
    assert on_hopper.fills_card(args[0].shape[0] * args[0].shape[1], args[1], dual=operation is not linear)


def assert_bits(run, x, residual=None) -> torch.Tensor:
    """Assert that `run(way, x, residual)` has the bits of the generic kernel, and return its output.

    In every repeat and place in the batch, alone and beside NaN.
    """
    y = run("hopper", x, residual)
    assert torch.equal(y, run("kernel", x, residual))
    for _ in range(10):
        assert torch.equal(run("hopper", x, residual), y)
    for place in (slice(0, 1), slice(-1, None), slice(-2, None)):
        assert torch.equal(run("by_plan", x[place], None if residual is None else residual[place]), y[place])
    beside = torch.cat([torch.full_like(x, torch.nan), x[:1]])
    both = None if residual is None else torch.cat([residual, residual[:1]])
    assert torch.equal(run("hopper", beside, both)[-1:], y[:1])
    return y


def way_of(operation: Operation, way: str):
    return partial(by_plan, operation) if way == "by_plan" else getattr(operation, way)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_linear(case, precision, dtype, device):
    (x, weight), options = case.inputs(dtype, device)
    made, residual = quantise(weight, precision), options.pop("residual", None)
    skip_if_not_launched(linear, x, made, residual=residual, **options)
    y = assert_bits(lambda way, x, residual: way_of(linear, way)(x, made, residual=residual, **options), x, residual)
    options |= {} if residual is None else {"residual": residual}
    _, alike = judged(linear, x, made, **options, **NARROW[precision])
    assert_costs_what_8_bits_cost(y, alike, truth((x, weight), options))


@pytest.mark.gpu
@pytest.mark.parametrize("operation", [swiglu, geglu], ids=["swiglu", "geglu"])
@pytest.mark.parametrize("sizes", GATED.values(), ids=GATED)
def test_gated(operation, sizes, precision, dtype, randn):
    n, tokens, channels, out_channels = sizes
    x, weight = randn(n, tokens, channels, dtype=dtype), randn(2 * out_channels, channels, dtype=dtype)
    weight, bias = weight * channels**-0.5, randn(2 * out_channels, dtype=dtype)
    made = quantise(weight, precision)
    skip_if_not_launched(operation, x, made, bias)
    y = assert_bits(lambda way, x, _: way_of(operation, way)(x, made, bias), x)
    _, alike = judged(operation, x, made, bias, **NARROW[precision])
    assert_costs_what_8_bits_cost(y, alike, in_dtype(torch.float64, BY_TORCH[operation], x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(8, 512, 640, 1920), Case(8, 301, 336, 1288)], ids=["C640", "odd"])
def test_tokens_have_the_same_bits_in_any_batch_and_place(case, precision, dtype, device):
    (x, weight), options = case.inputs(dtype, device)
    made = quantise(weight, precision)
    skip_if_not_launched(linear, x, made, **options)
    y = linear.hopper(x, made, **options)
    for first, n in ((0, 1), (0, 3), (5, 1), (2, 3)):
        assert torch.equal(by_plan(linear, x[first : first + n], made, **options), y[first : first + n])


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0])
def test_a_factor_that_is_none_stays_with_its_channel(factor, randn):
    x, made = randn(2, 1000, 144, dtype=torch.bfloat16), quantise(randn(1016, 144), FP8)
    ones = torch.ones(1016, dtype=x.dtype, device=x.device)
    skip_if_not_launched(linear, x, made, ones)
    expected = linear.hopper(x, made, ones)
    with torch.no_grad():
        made.scale[5] = factor
    y = linear.hopper(x, made, ones)
    others = torch.arange(1016, device=x.device) != 5
    assert torch.equal(y[..., others], expected[..., others])
    assert (y[..., 5] == 1).all() if factor == 0 else not y[..., 5].isfinite().any()


@pytest.mark.gpu
def test_tokens_may_be_in_fp8_already_or_strided(randn):
    x, made = randn(2, 1000, 288, dtype=torch.bfloat16)[..., 144:], quantise(randn(1016, 144), FP8)
    skip_if_not_launched(linear, x, made)
    y = linear.hopper(x, made)
    assert torch.equal(linear.hopper(to_fp8(x)[0], made), y) and torch.equal(linear.hopper(x.contiguous(), made), y)
    made = quantise(randn(2032, 144), FP8)
    assert torch.equal(geglu.hopper(to_fp8(x)[0], made), geglu.kernel(x, made))


def test_plans_are_of_the_weight_s_format():
    x, weight = torch.zeros(1, 2, 32).bfloat16(), torch.zeros(48, 32)
    assert LinearCall(x, quantise(weight, FP8)).hopper_plan() == "linear 32 to 48, fp8"
    residual = torch.zeros(1, 2, 48).bfloat16()
    assert LinearCall(x, quantise(weight, FP8), residual=residual).hopper_plan() == "linear 32 to 48, residual, fp8"
    assert LinearCall(to_fp8(x)[0], quantise(weight, FP8)).hopper_plan() == "linear 32 to 48, fp8"
    assert LinearCall(x, quantise(weight, INT8)).hopper_plan() == "linear 32 to 48, int8"
    assert LinearCall(x.float(), quantise(weight, FP8)).hopper_plan() is None
    assert geglu.parse(x, quantise(weight, FP8)).hopper_plan() == "geglu 32 to 48, fp8"
