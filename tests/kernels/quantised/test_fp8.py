"""Products and convolutions in fp8, with weights and activations in e4m3.

Results are compared with float64 results for the same e4m3 values, and for the original values. The interpreter
multiplies e4m3 with numpy in float16, in which these products are exact.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.conv2d import conv2d
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host import launching
from fastdiff.kernels.host.recording import record
from fastdiff.kernels.host.weights import FP8
from fastdiff.kernels.host.weights import quantise as quantise_to
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import confirmation
from fastdiff.kernels.swiglu import swiglu
from fastdiff.kernels.to_fp8 import to_fp8
from tests.kernels import test_conv2d as convolutions
from tests.kernels import test_conv2d_hopper as sm_90
from tests.kernels import test_linear as products
from tests.kernels.quantised.test_quantised import (
    CONVOLUTIONS,
    PRODUCTS,
    REPEATS,
    WORSE,
    assert_costs_what_8_bits_cost,
    assert_pictures_have_the_same_bits,
    assert_tokens_have_the_same_bits,
)
from tests.kernels.quantised.test_quantised import judged as judged_of_8_bits
from tests.kernels.test_conv2d import Case as Convolution
from tests.kernels.test_linear import Case as Product
from tests.kernels.test_to_fp8 import dequantised

quantise = partial(quantise_to, dtype=FP8)
gpu = pytest.mark.gpu


@pytest.fixture(params=["descriptors", "pointers-in-fp8"])
def loads(request, monkeypatch, runs_triton):
    """Both ways of loading; pointers as on an sm_89 card."""
    if request.param == "pointers-in-fp8":
        monkeypatch.setattr(launching, "capability", lambda device: (8, 9))


judged = partial(judged_of_8_bits, narrow=dequantised)


@pytest.fixture
def assert_close(assert_accurate):
    """`assert_accurate`, but for float32 and float16 on a card only a bound on the RMS error.

    A card's matrix unit sums a step with only about 14 bits.
    """

    def check(y, torchs, expected):
        if y.device.type == "cpu" or y.dtype == torch.bfloat16:
            return assert_accurate(y, torchs, expected)
        error, size = (each.double().square().mean().sqrt() for each in (y - expected, expected))
        assert error <= 2**-9 * size, f"RMS error {error / size:.3g} of the RMS"

    return check


class TestQuantise:
    def test_is_within_half_a_step(self):
        weight = torch.randn(20, 7, 3, 3, generator=torch.Generator().manual_seed(0))
        made = quantise(weight.contiguous(memory_format=torch.channels_last))
        assert made.values.dtype == FP8 and made.values.is_contiguous(memory_format=torch.channels_last)
        assert (made.values.float().abs().amax(dim=(1, 2, 3)) == 448).all()
        error = (made.dequantised(torch.float32) - weight).abs()
        assert (error <= weight.abs() / 16 + made.scale[:, None, None, None] * 2**-10).all()

    def test_zeros_and_what_is_no_number_stay_with_their_channel(self):
        nan, inf = float("nan"), float("inf")
        made = quantise(torch.tensor([[0.0, 0.0], [1e-45, 0.0], [1.0, nan], [1.0, -inf], [1.0, 2.0]]))
        y = made.dequantised(torch.float32)
        assert not y[:2].any() and not y[2:4].isfinite().any() and y[4].tolist() == [1, 2]

    def test_it_keeps_its_bits_when_a_model_changes_its_dtype(self):
        made = quantise(torch.randn(3, 4) / 1e6)
        moved = quantise(torch.randn(3, 4)).to(torch.float16)
        assert (moved.values.dtype, moved.scale.dtype) == (FP8, torch.float32)
        assert torch.equal(made.to(torch.float16).dequantised(torch.float32), made.dequantised(torch.float32))


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_linear(case, dot_dtype, device, runs_triton, loads, assert_close):
    (x, weight), options = case.inputs(dot_dtype, device)
    if "rms_norm" in options:
        scale, eps = options.pop("rms_norm")
        x = F.rms_norm(x, x.shape[-1:], scale, eps)
    made = quantise(weight)
    run = linear.kernel if runs_triton else linear
    torchs, expected = judged(linear, x, made, **options)
    for _ in range(REPEATS if device.type == "cuda" else 1):
        y = run(x, made, **options)
        assert_close(y, torchs, expected)
        assert_costs_what_8_bits_cost(y, expected, products.truth((x, weight), options))


def test_rms_norm_comes_first(dot_dtype, device, runs_triton, randn):
    x, made = randn(2, 5, 32, dtype=dot_dtype), quantise(randn(24, 32))
    y = (linear.kernel if runs_triton else linear)(x, made, rms_norm=(None, 1e-6))
    expected = linear(layer_norm(x, None, eps=1e-6, rms=True), made)
    assert torch.equal(y, expected)


def test_tokens_may_be_in_fp8_already(dot_dtype, randn, device):
    x, made = randn(2, 5, 32, dtype=dot_dtype), quantise(randn(24, 32))
    (scaled,) = to_fp8(x)
    for operation in (linear, geglu):
        assert torch.equal(operation(scaled, made), operation(x, made))
    with record(device) as listener:
        linear(scaled, made)
    assert next(call for call in listener.calls if call.operation == "linear").shape == "2x5x32 in fp8, 24x32 in fp8"
    for wrong in ({"weight": randn(24, 32, dtype=dot_dtype)}, {"weight": made, "rms_norm": (None, 1e-6)}):
        with pytest.raises(ValueError, match=r"^x: it is in fp8"):
            linear(scaled, **wrong)


@pytest.mark.parametrize("operation", [swiglu, geglu], ids=["swiglu", "geglu"])
@pytest.mark.parametrize(
    "sizes", [(2, 40, 64, 128), (1, 7, 20, 9), pytest.param((2, 1024, 640, 2560), marks=gpu)], ids=str
)
def test_gated(operation, sizes, dot_dtype, device, randn, runs_triton, loads, assert_close):
    n, tokens, channels, out = sizes
    x, weight = randn(n, tokens, channels, dtype=dot_dtype), randn(2 * out, channels) * channels**-0.5
    bias, made = randn(2 * out, dtype=dot_dtype), quantise(weight)
    y = (operation.kernel if runs_triton else operation)(x, made, bias)
    assert_close(y, *judged(operation, x, made, bias))


@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_conv2d(case, dot_dtype, device, runs_triton, loads, assert_close):
    (x, weight, bias), options = case.inputs(dot_dtype, device)
    made = quantise(weight)
    run = conv2d.kernel if runs_triton else conv2d
    torchs, expected = judged(conv2d, x, made, bias, **options)
    for _ in range(REPEATS if device.type == "cuda" else 1):
        y = run(x, made, bias, **options)
        assert_close(y, torchs, expected)
        assert_costs_what_8_bits_cost(y, expected, convolutions.truth((x, weight, bias), options))


FOR_SM_90 = {
    "N8-C128-H256": Convolution(8, 256, 256, (128,), 128, residual=True),
    "N64-C128-H32": Convolution(64, 32, 32, (128,), 128, temb=True),
    "N8-C256-H64": Convolution(8, 64, 64, (256,), 256),
    "N2-C320-H128": Convolution(2, 128, 128, (320,), 320, residual=True),
    "N2-C640-H64": Convolution(2, 64, 64, (640,), 640, residual=True, output_scale=2**0.5),
    "N2-C1280-H32": Convolution(2, 32, 32, (1280,), 1280, temb=True),
    "N16-C320-H64": Convolution(16, 64, 64, (320,), 320, temb=True),
    "N8-C512-H16": Convolution(8, 16, 16, (512,), 512, residual=True),
    "N1-C256-H16-few-tiles": Convolution(1, 16, 16, (256,), 256, temb=True),
    "N3-C96-H24-W48-odd": Convolution(3, 24, 48, (96,), 160, temb=True, residual=True),
    "N2-C208-H20-W40-odd": Convolution(2, 20, 40, (208,), 72, residual=True),
    "N2-C320-H104-W152-odd": Convolution(2, 104, 152, (320,), 320, temb=True),
    "N8-C128-H128-up": Convolution(8, 128, 128, (128,), 128, upsample=True),
    "N2-C1280-H32-up": Convolution(2, 32, 32, (1280,), 1280, upsample=True),
    "N1-C80-H12-W20-up-odd": Convolution(1, 12, 20, (80,), 128, upsample=True, residual=True, temb=True),
    "N2-C640+320-H64-pair": Convolution(2, 64, 64, (640, 320), 320),
    "N2-C144+48-H24-W20-pair-odd": Convolution(2, 24, 20, (144, 48), 72),
    "N8-C128-H64-shortcut-C256": Convolution(8, 64, 64, (128,), 128, shortcut=(256,), output_scale=2**0.5),
    "N2-C640-H32-shortcut-C1280+640": Convolution(2, 32, 32, (640,), 640, shortcut=(1280, 640)),
    "N3-C64-H20-W40-shortcut-odd": Convolution(3, 20, 40, (64,), 72, temb=True, shortcut=(72, 40)),
}


@gpu
class TestConvolutionForSm90:
    """The sm_90 kernel in fp8. tests/kernels/test_conv2d_hopper.py tests it in 16 bits."""

    @pytest.fixture(autouse=True)
    def runs_gluon(self, device):
        reason = confirmation.gluon_obstacle(device)
        if reason is not None:
            pytest.skip(reason)

    @pytest.mark.parametrize("case", FOR_SM_90.values(), ids=FOR_SM_90)
    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_output_and_moments(self, case, half, device, assert_close):
        (x, weight, bias), options = case.inputs(half, device)
        made = quantise(weight)
        assert conv2d.parse(x, made, bias, **options).hopper_plan().endswith(", fp8")
        torchs, expected = judged(conv2d, x, made, bias, **options)
        y, *moments = sm_90.run((x, made, bias), options)
        assert_close(y, torchs, expected)
        assert_costs_what_8_bits_cost(y, expected, convolutions.truth((x, weight, bias), options))
        if half == torch.bfloat16:  # in float16 the matrix unit's error dominates, and its steps may be longer here
            twin = conv2d.kernel(x, made, bias, **options)
            error, twins = ((each - expected).square().mean().sqrt() for each in (y, twin))
            assert error <= WORSE * twins, f"RMS error {error:.3g}; the generic kernel has {twins:.3g}"
        if moments:
            mean, spread = expected.mean((1, 2)), expected.flatten(1, 2).std(1, correction=0)
            assert ((moments[0].double().mean(1) - mean).abs() <= 1e-3 * spread).all()

    @pytest.mark.parametrize("case", FOR_SM_90.values(), ids=FOR_SM_90)
    def test_bits(self, case, device, monkeypatch):
        (x, weight, bias), options = case.inputs(torch.bfloat16, device)
        sm_90.assert_bits((x, quantise(weight), bias), options, (16,), monkeypatch)

    def test_pictures_have_the_same_bits_in_any_batch_and_place(self, device, monkeypatch):
        monkeypatch.setattr(conv2d, "kernel", conv2d.hopper)
        for case in (Convolution(8, 64, 64, (320,), 320), Convolution(8, 16, 16, (256,), 256, temb=True)):
            assert_pictures_have_the_same_bits(case, torch.bfloat16, device, quantise)


@pytest.fixture
def smallest_tiles(runs_triton, device, dot_dtype, monkeypatch):
    """Use the smallest tile for all batches in the interpreter: it multiplies with numpy, whose bits depend on it."""
    if not runs_triton:
        pytest.skip("torch's products do not guarantee this")
    if device.type == "cpu" and dot_dtype == torch.float32:
        pytest.skip("the interpreter's sums are in float16")
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", 10**6)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Product(4, 16, 144, 64, gate=True, residual=True), id="C144"),
        pytest.param(Product(4, 21, 36, 20), id="odd"),
        pytest.param(Product(8, 256, 1152, 4608), id="C1152", marks=gpu),
        pytest.param(Product(8, 1024, 640, 640), id="C640", marks=gpu),
        pytest.param(Product(8, 1, 1280, 640), id="time-embedding", marks=gpu),
    ],
)
def test_tokens_have_the_same_bits_in_any_batch_and_place(case, dot_dtype, device, smallest_tiles, loads):
    assert_tokens_have_the_same_bits(case, dot_dtype, device, quantise)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Convolution(4, 8, 8, (32,), 64, temb=True), id="C32-H8"),
        pytest.param(Convolution(4, 7, 7, (36,), 20), id="odd"),
        pytest.param(Convolution(4, 1, 16, (32,), 64, kernel=(1, 5), padding=(2, 2, 0, 0)), id="row"),
        pytest.param(Convolution(8, 4, 4, (512,), 32), id="C512-H4-chunks", marks=gpu),
        pytest.param(Convolution(8, 64, 64, (320,), 320), id="C320-H64", marks=gpu),
        pytest.param(Convolution(8, 32, 32, (640, 320), 640), id="C640+320-H32", marks=gpu),
        pytest.param(Convolution(8, 8, 8, (1280,), 1280), id="C1280-H8", marks=gpu),
        pytest.param(Convolution(8, 16, 16, (256,), 256, stride=2), id="C256-H16-down", marks=gpu),
        pytest.param(Convolution(8, 8, 8, (512,), 512, upsample=True), id="C512-H8-up", marks=gpu),
    ],
)
def test_pictures_have_the_same_bits_in_any_batch_and_place(case, dot_dtype, device, smallest_tiles, loads):
    assert_pictures_have_the_same_bits(case, dot_dtype, device, quantise)


NUMPY = "ignore:(invalid value|overflow):RuntimeWarning"  # numpy's, in the interpreter


@pytest.mark.filterwarnings(NUMPY)
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0])
def test_a_factor_that_is_none_stays_with_its_channel(factor, dot_dtype, device, randn, loads):
    x, made = randn(1, 16, 32, dtype=dot_dtype), quantise(randn(24, 32))
    ones = torch.ones(24, dtype=dot_dtype, device=device)
    expected = linear(x, made, ones)
    with torch.no_grad():
        made.scale[5] = factor
    y = linear(x, made, ones)
    others = torch.arange(24, device=device) != 5
    assert torch.equal(y[..., others], expected[..., others])
    assert (y[..., 5] == 1).all() if factor == 0 else not y[..., 5].isfinite().any()


@pytest.mark.filterwarnings(NUMPY)
def test_nan_in_a_token_or_picture_stays_with_it(dot_dtype, device, randn, loads):
    x, made = randn(3, 16, 32, dtype=dot_dtype), quantise(randn(24, 32))
    x[1, 4, 7] = float("nan")
    y = linear(x, made)
    assert y[1, 4].isnan().all() and y.isnan().sum() == 24
    pixels = conv2d(x.view(3, 4, 4, 32), made.unflatten(1, (-1, 1, 1)), None)
    assert pixels[1, 1, 0].isnan().all() and pixels.isnan().sum() == 24
    x[1, 4, 7] = float("inf")
    y = conv2d(x.view(3, 4, 4, 32), made.unflatten(1, (-1, 1, 1)), None)
    assert not y[1].isfinite().any() and y[::2].isfinite().all()


def test_x_of_zeros_is_the_bias(dot_dtype, device, randn, loads):
    x, made = torch.zeros(2, 16, 32, dtype=dot_dtype, device=device), quantise(randn(24, 32))
    assert (linear(x, made, torch.ones(24, dtype=dot_dtype, device=device)) == 1).all()


def test_cards_from_sm_89_on_multiply_fp8(monkeypatch):
    for card, reason in {(8, 6): "sm_86 and has no fp8", (8, 9): None, (9, 0): None, (12, 0): None}.items():
        monkeypatch.setattr(launching, "capability", lambda device, card=card: card)
        assert launching.fp8_obstacle(torch.device("cpu")) == reason, card


def test_a_card_without_fp8_runs_the_reference(device, randn, monkeypatch, runs_triton):
    if not runs_triton:
        pytest.skip("there is no card")
    monkeypatch.setattr(launching, "capability", lambda device: (8, 0))
    x, made = randn(1, 16, 32), quantise(randn(24, 32))
    with record(device) as listener:
        assert torch.equal(linear(x, made), linear.reference(x, made))
    call = next(call for call in listener.calls if call.operation == "linear")
    assert call.shape == "1x16x32, 24x32 in fp8" and call.why == "sm_80 and has no fp8" and not call.kernels
