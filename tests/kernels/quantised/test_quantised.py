"""8-bit weights: their values and scales, and the products and convolutions in int8 (test_fp8.py: e4m3).

Every error is measured twice: the error of quantisation, against the original weight; and the error of the kernel,
against the same 8-bit values in higher precision.
"""

from functools import partial

import pytest
import torch

from fastdiff.kernels.conv2d import Shortcut, conv2d
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host import launching
from fastdiff.kernels.host.recording import record
from fastdiff.kernels.host.weights import INT8, Quantised
from fastdiff.kernels.host.weights import quantise as quantise_to
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import confirmation
from fastdiff.kernels.swiglu import swiglu
from tests.kernels import test_conv2d as convolutions
from tests.kernels import test_conv2d_hopper as sm_90
from tests.kernels import test_geglu, test_swiglu
from tests.kernels import test_linear as products
from tests.kernels.test_conv2d import Case as Convolution
from tests.kernels.test_linear import Case as Product
from tests.support.accuracy import in_dtype

quantise = partial(quantise_to, dtype=INT8)
WORSE = 1.1  # allowed error, relative to that of the exact result with the same quantised values
BY_TORCH = {
    linear: products.by_torch,
    conv2d: convolutions.by_torch,
    swiglu: test_swiglu.by_torch,
    geglu: test_geglu.by_torch,
}
gpu = pytest.mark.gpu


class TestQuantise:
    def test_is_within_half_a_step(self):
        weight = torch.randn(20, 7, 3, 3, generator=torch.Generator().manual_seed(0))
        made = quantise(weight.contiguous(memory_format=torch.channels_last))
        assert made.values.is_contiguous(memory_format=torch.channels_last)
        step = weight.abs().amax(dim=(1, 2, 3)) / 127
        assert torch.equal(made.scale, step)
        error = (made.dequantised(torch.float32) - weight).abs().amax(dim=(1, 2, 3))
        assert (error <= step * 0.50001).all()

    def test_the_largest_magnitude_is_127(self):
        made = quantise(torch.tensor([[1e-30, -2e-30], [3e38, 1.0], [5.0, 5.0]]))
        assert made.values.tolist() == [[64, -127], [127, 0], [127, 127]]

    def test_a_channel_of_zeros_or_of_almost_nothing_is_zeros(self):
        made = quantise(torch.tensor([[0.0, 0.0], [1e-45, 0.0]]))
        assert not made.dequantised(torch.float32).any()

    def test_stacked_layers_are_the_layers_stacked(self):
        q, k = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
        whole, parts = quantise(torch.cat([q, k])), [quantise(q), quantise(k)]
        assert torch.equal(whole.values, torch.cat([part.values for part in parts]))
        assert torch.equal(whole.scale, torch.cat([part.scale for part in parts]))
        for part, each in zip(parts, whole.unflatten(0, (2, -1)).unbind(), strict=True):
            assert torch.equal(part.values, each.values) and torch.equal(part.scale, each.scale)

    def test_factors_stay_float32_when_a_model_changes_its_dtype(self):
        weight = torch.randn(3, 4) / 1e6  # its scales are too small for float16
        made = quantise(weight).to(torch.float16)
        assert made.scale.dtype == torch.float32 and torch.equal(made.scale, quantise(weight).scale)
        assert torch.equal(made.values, quantise(weight).values)

    @pytest.mark.parametrize("bad", [(torch.zeros(2, 3), torch.ones(2)), (torch.zeros(2, 3).char(), torch.ones(3))])
    def test_parts_that_do_not_fit_are_refused(self, bad):
        with pytest.raises(ValueError, match="scale"):
            Quantised(*bad)


def judged(operation, x, made, *rest, narrow=lambda x, dtype: x, **options):
    """Return torch's result with the dequantised weight, in the dtype of x, and the truth.

    Args:
        narrow: called as `narrow(x, dtype)`; rounds x as the operation does.
    """
    dtype = (x[0] if isinstance(x, tuple) else x).dtype

    def run(to, weights):
        given = narrow(x, weights), made.dequantised(weights), *rest
        return in_dtype(to, BY_TORCH[operation], *given, **options)

    return run(dtype, dtype), run(torch.float64, torch.float32)


def assert_costs_what_8_bits_cost(y, alike, truth):
    """Compare two RMS errors against the result with the original weight.

    The error of y may be only a little larger than the error of `alike`, the exact result with the same quantised
    values.
    """
    error, allowed = ((each - truth).square().mean().sqrt() for each in (y, alike))
    assert error <= WORSE * allowed + torch.finfo(y.dtype).eps / 2 * truth.square().mean().sqrt(), (
        f"error {error:.3g}; the exact result with the same quantised values has {allowed:.3g}"
    )


PRODUCTS = {
    "N2-L64-C128-qkv": Product(2, 64, 128, 384),
    "N2-L48-C64-fc1": Product(2, 48, 64, 256, activation="gelu_tanh"),
    "N2-L48-C256-fc2": Product(2, 48, 256, 64, gate=True, residual=True),
    "N2-L40-C96-rms-norm": Product(2, 40, 96, 64, bias=False, rms_norm=1e-6),
    "N2-L21-C36-odd": Product(2, 21, 36, 20, activation="gelu", gate=True, residual=True),
    "N2-L13-C40-rows-of-40-bytes": Product(2, 13, 40, 24),
    "N1-L1-C1-smallest": Product(1, 1, 1, 1),
    "N2-L256-C1152-qkv": pytest.param(Product(2, 256, 1152, 3456), marks=gpu),
    "N32-L256-C4608-fc2": pytest.param(Product(32, 256, 4608, 1152, gate=True, residual=True), marks=gpu),
    "N2-L77-C2048-text": pytest.param(Product(2, 77, 2048, 4096, bias=False), marks=gpu),
}
REPEATS = 4  # a race shows as an error that changes between repeats


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_linear(case, dot_dtype, device, runs_triton, loads, assert_accurate):
    (x, weight), options = case.inputs(dot_dtype, device)
    made = quantise(weight)
    run = linear.kernel if runs_triton else linear
    torchs, alike = judged(linear, x, made, **options)
    for _ in range(REPEATS if device.type == "cuda" else 1):
        y = run(x, made, **options)
        assert_accurate(y, torchs, alike)
        assert_costs_what_8_bits_cost(y, alike, products.truth((x, weight), options))


@pytest.mark.parametrize("operation", [swiglu, geglu], ids=["swiglu", "geglu"])
@pytest.mark.parametrize("sizes", [(2, 40, 64, 128), (1, 7, 20, 9)], ids=["N2-L40-C64", "odd"])
def test_gated(operation, sizes, dot_dtype, device, randn, runs_triton, loads, assert_accurate):
    n, tokens, channels, out = sizes
    x, weight = randn(n, tokens, channels, dtype=dot_dtype), randn(2 * out, channels) * channels**-0.5
    bias, made = randn(2 * out, dtype=dot_dtype), quantise(weight)
    y = (operation.kernel if runs_triton else operation)(x, made, bias)
    assert_accurate(y, *judged(operation, x, made, bias))


CONVOLUTIONS = {
    "N2-C32-H16-temb-residual": Convolution(2, 16, 16, (32,), 32, temb=True, residual=True, output_scale=2**0.5),
    "N1-C32+64-H8-pair": Convolution(1, 8, 8, (32, 64), 48),
    "N2-C32-H8-shortcut": Convolution(2, 8, 8, (32,), 64, shortcut=(32, 16)),
    "N1-C32-H8-down": Convolution(1, 8, 8, (32,), 32, stride=2, padding=(0, 1, 0, 1)),
    "N1-C32-H8-up": Convolution(1, 8, 8, (32,), 32, upsample=True),
    "N1-C512-H4-chunks": Convolution(1, 4, 4, (512,), 32),
    "N2-C8-H8-rows-of-72-bytes": Convolution(2, 8, 8, (8,), 32),
    "N2-C36-H7-odd": Convolution(2, 7, 7, (36,), 20),
    "N1-C1-H3-smallest": Convolution(1, 3, 3, (1,), 1),
    "N1-C32-H16-1x1": Convolution(1, 16, 16, (32,), 48, kernel=(1, 1), padding=0),
    "N2-L16-C32-row": Convolution(2, 1, 16, (32,), 32, kernel=(1, 5), padding=(2, 2, 0, 0)),
    "N2-C320-H64": pytest.param(Convolution(2, 64, 64, (320,), 320, temb=True), marks=gpu),
    "N2-C1280-H32": pytest.param(Convolution(2, 32, 32, (1280,), 1280, residual=True), marks=gpu),
    "N1-C1024-H8-spread": pytest.param(Convolution(1, 8, 8, (1024,), 512), marks=gpu),
    "N2-C640-H32-down": pytest.param(Convolution(2, 32, 32, (640,), 640, stride=2), marks=gpu),
    "N2-C640-H32-up": pytest.param(Convolution(2, 32, 32, (640,), 640, upsample=True), marks=gpu),
}


@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_conv2d(case, dot_dtype, device, runs_triton, loads, assert_accurate):
    (x, weight, bias), options = case.inputs(dot_dtype, device)
    made = quantise(weight)
    run = conv2d.kernel if runs_triton else conv2d
    torchs, alike = judged(conv2d, x, made, bias, **options)
    for _ in range(REPEATS if device.type == "cuda" else 1):
        y = run(x, made, bias, **options)
        assert_accurate(y, torchs, alike)
        assert_costs_what_8_bits_cost(y, alike, convolutions.truth((x, weight, bias), options))


def assert_tokens_have_the_same_bits(case, dtype, device, quantise):
    """Compare the bits of a product's pictures at several batch sizes and places."""
    (x, weight), options = case.inputs(dtype, device)
    made, shared = quantise(weight), {name: options.pop(name) for name in ("bias", "activation")}

    def run(first, n):
        own = {name: each[first : first + n] for name, each in options.items()}
        return linear.kernel(x[first : first + n], made, **shared, **own)

    _assert_same_in_any_batch_and_place(run, case.n)


def assert_pictures_have_the_same_bits(case, dtype, device, quantise):
    """Compare the bits of a convolution's pictures at several batch sizes and places."""
    (x, weight, bias), options = case.inputs(dtype, device)
    made, temb = quantise(weight), options.pop("temb", None)

    def run(first, n):
        which = slice(first, first + n)
        own = {} if temb is None else {"temb": temb[which]}
        pictures = tuple(part[which] for part in x) if isinstance(x, tuple) else x[which]
        return conv2d.kernel(pictures, made, bias, **options, **own)

    _assert_same_in_any_batch_and_place(run, case.n)


def _assert_same_in_any_batch_and_place(run, pictures):
    """Assert that `run(first, n)`, the n pictures from `first` on, has the same bits as in a batch of `pictures`."""
    many = run(0, pictures)
    by_numpy = many.device.type == "cpu" and many.dtype == torch.float32  # numpy's bits depend on the row of the tile
    for first, n in ((0, 1), (0, 3), *(() if by_numpy else ((pictures - 3, 1), (pictures // 4, 3)))):
        assert torch.equal(run(first, n), many[first : first + n]), f"{n} pictures from {first} on"


@pytest.fixture
def smallest_tiles(runs_triton, monkeypatch):
    """Use the smallest tile for all batches in the interpreter: it multiplies with numpy, whose bits depend on it."""
    if not runs_triton:
        pytest.skip("torch's products do not guarantee this")
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", 10**6)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Product(4, 48, 256, 64, gate=True, residual=True), id="C256"),
        pytest.param(Product(4, 21, 36, 20), id="odd"),
        pytest.param(Product(8, 256, 1152, 4608), id="C1152", marks=gpu),
        pytest.param(Product(8, 1024, 640, 640), id="C640", marks=gpu),
    ],
)
def test_tokens_have_the_same_bits_in_any_batch_and_place(case, dot_dtype, device, smallest_tiles, loads):
    assert_tokens_have_the_same_bits(case, dot_dtype, device, quantise)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Convolution(4, 8, 8, (32,), 64, temb=True), id="C32-H8"),
        pytest.param(Convolution(8, 4, 4, (512,), 32), id="C512-H4-chunks", marks=gpu),
        pytest.param(Convolution(4, 7, 7, (36,), 20), id="odd"),
        pytest.param(Convolution(8, 64, 64, (320,), 320), id="C320-H64", marks=gpu),
        pytest.param(Convolution(8, 8, 8, (1280,), 1280), id="C1280-H8", marks=gpu),
    ],
)
def test_pictures_have_the_same_bits_in_any_batch_and_place(case, dot_dtype, device, smallest_tiles, loads):
    assert_pictures_have_the_same_bits(case, dot_dtype, device, quantise)


NUMPY = "ignore:invalid value:RuntimeWarning"  # numpy's, in the interpreter


@pytest.mark.filterwarnings(NUMPY)
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0])
def test_a_factor_that_is_none_stays_with_its_channel(factor, dot_dtype, device, randn, loads):
    """As with a weight of such values, the channel becomes NaN or infinite, or the bias for a scale of 0."""
    x, made = randn(1, 16, 32, dtype=dot_dtype), quantise(randn(24, 32))
    expected = linear(x, made, torch.ones(24, dtype=dot_dtype, device=device))
    with torch.no_grad():
        made.scale[5] = factor
    y = linear(x, made, torch.ones(24, dtype=dot_dtype, device=device))
    others = torch.arange(24, device=device) != 5
    assert torch.equal(y[..., others], expected[..., others])
    assert (y[..., 5] == 1).all() if factor == 0 else not y[..., 5].isfinite().any()
    made.values.data[5] = 0
    y = conv2d(x.view(1, 4, 4, 32), made.unflatten(1, (-1, 1, 1)), None)
    assert (y[..., 5] == 0).all() if factor == 0 else y[..., 5].isnan().all()


@pytest.mark.filterwarnings(NUMPY)
@pytest.mark.usefixtures("runs_triton")
def test_nan_and_infinity_in_a_weight_are_seen():
    weight = torch.tensor([[1.0, float("nan")], [1.0, float("-inf")], [1.0, 2.0]])
    made = quantise(weight)
    y = linear(torch.ones(1, 1, 2), made)[0, 0]
    assert not y[:2].isfinite().any() and y[2] == pytest.approx(3, abs=0.02)


def test_a_report_says_that_a_weight_has_8_bits(device, randn):
    x, made = randn(1, 16, 32), quantise(randn(24, 32))
    with record(device) as listener:
        linear(x, made)
    (call,) = (call for call in listener.calls if call.operation == "linear")
    assert call.shape == "1x16x32, 24x32 in int8" and call.flop == 2 * 16 * 32 * 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_wrong_arguments_are_named(dtype):
    x, made = torch.zeros(1, 4, 4, 8, dtype=dtype), quantise(torch.zeros(6, 8, 1, 1))
    with pytest.raises(ValueError, match=r"^weight: expected"):
        conv2d(x, quantise(torch.zeros(6, 7, 1, 1)))
    with pytest.raises(ValueError, match=r"^weight: .* on meta"):
        conv2d(x, made.on_meta())
    with pytest.raises(ValueError, match=r"^weight: .* on meta"):
        linear(x.flatten(1, 2), made.flatten(1).on_meta())
    with pytest.raises(ValueError, match=r"^shortcut: "):
        conv2d(x, made, shortcut=Shortcut(x, made))


@gpu
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Convolution(8, 256, 256, (128,), 128, residual=True), id="N8-C128-H256"),
        pytest.param(Convolution(2, 32, 32, (1280,), 1280, temb=True), id="N2-C1280-H32"),
        pytest.param(Convolution(2, 64, 64, (640, 320), 320), id="N2-C640+320-H64-pair"),
        pytest.param(Convolution(8, 128, 128, (128,), 128, upsample=True), id="N8-C128-H128-up"),
        pytest.param(Convolution(3, 24, 48, (96,), 160, temb=True, residual=True), id="N3-C96-H24-W48-odd"),
    ],
)
def test_convolutions_by_the_kernel_for_sm_90(case, device, assert_accurate, monkeypatch):
    reason = confirmation.gluon_obstacle(device)
    if reason is not None:
        pytest.skip(reason)
    (x, weight, bias), options = case.inputs(torch.bfloat16, device)
    made = quantise(weight)
    assert conv2d.parse(x, made, bias, **options).hopper_plan().endswith(", int8")
    torchs, expected = judged(conv2d, x, made, bias, **options)
    y, *_ = sm_90.run((x, made, bias), options)
    assert_accurate(y, torchs, expected)
    assert_costs_what_8_bits_cost(y, expected, convolutions.truth((x, weight, bias), options))
    sm_90.assert_bits((x, made, bias), options, (16, 8), monkeypatch)
