"""The torch functions of the references: compared with torch in float64, and the same bits with packed weights."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastdiff.kernels.conv2d import Shortcut, conv2d
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import cpu
from fastdiff.kernels.swiglu import swiglu
from tests.kernels.test_conv2d import by_torch as conv2d_by_torch
from tests.kernels.test_geglu import by_torch as geglu_by_torch
from tests.kernels.test_group_norm import by_torch as group_norm_by_torch
from tests.kernels.test_linear import by_torch as linear_by_torch
from tests.kernels.test_swiglu import by_torch as swiglu_by_torch
from tests.support.accuracy import CAPS, peer_and_truth

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def one_dnn():
    if not cpu.by_onednn(torch.ones(1)):
        pytest.skip("this torch has no oneDNN")


def assert_accurate(y, torchs, truth):
    """Assert that y is about as accurate as torch's own function."""
    assert y.is_contiguous()
    off, torchs_off = ((each.double() - truth).abs().max().item() for each in (y, torchs))
    ulp = torch.finfo(y.dtype).eps
    assert off <= min(2 * torchs_off + ulp * truth.abs().max().item(), CAPS[y.dtype] * truth.abs().max().item())


class Functions(TorchDispatchMode):
    """The names of the torch functions that run, without views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@DTYPES
def test_linear(randn, dtype):
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((2, 100, 500), (100, 500), (100,)))
    assert_accurate(linear.reference(x, weight, bias), *peer_and_truth(F.linear, dtype, x, weight, bias))


@DTYPES
@pytest.mark.parametrize("added", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "quick_gelu", "silu"], ids=str)
def test_after_a_product(randn, dtype, activation, added):
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((2, 50, 80), (100, 80), (100,)))
    residual = randn(50, 2, 100, dtype=dtype).transpose(0, 1) if added else None
    args, options = (x, weight / 9, bias), {"activation": activation, "residual": residual}
    assert_accurate(linear.reference(*args, **options), *peer_and_truth(linear_by_torch, dtype, *args, **options))


@DTYPES
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("operation, by_torch", [(geglu, geglu_by_torch), (swiglu, swiglu_by_torch)], ids=["ge", "swi"])
def test_gated(randn, dtype, operation, by_torch, biased):
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((2, 50, 80), (200, 80), (200,)))
    args = (x, weight / 9, bias)[: 3 if biased else 2]
    assert_accurate(operation.reference(*args), *peer_and_truth(by_torch, dtype, *args))


def test_one_function_adds_activates_and_multiplies(randn):
    x, weight, residual = randn(2, 10, 40), randn(40, 40), randn(2, 10, 40)
    pixels, filters, temb = randn(2, 5, 2, 40), randn(40, 40, 1, 1), randn(1, 40)
    shortcut = Shortcut((pixels, pixels), randn(40, 80, 1, 1))
    with Functions() as functions:
        linear.reference(x, weight, residual=residual)
        linear.reference(x, weight, activation="silu")
        conv2d.reference(pixels, filters, residual=pixels)
    assert functions.names == ["_linear_pointwise"] * 3
    with Functions() as functions:
        geglu.reference(x, weight)
    assert functions.names == ["_linear_pointwise"] * 2
    with Functions() as functions:
        conv2d.reference(pixels, filters, shortcut=shortcut)
    assert functions.names == ["cat"] + ["_linear_pointwise"] * 2
    with Functions() as functions:
        y = conv2d.reference(pixels, filters, temb=temb.expand(2, 40))
    assert functions.names == ["_linear_pointwise"] and torch.equal(y, conv2d.reference(pixels, filters, temb[0]))


@DTYPES
@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "padding": (0, 1, 0, 1)}, {"padding": 0}], ids=str)
@pytest.mark.parametrize("size", [(1, 5, 7), (2, 8, 8)], ids=str)
def test_conv2d(randn, dtype, options, size):
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((*size, 40), (24, 40, 3, 3), (24,)))
    weight = weight.to(memory_format=torch.channels_last)
    y = conv2d.reference(x, weight, bias, **options)
    pair = conv2d.reference((x[..., :16], x[..., 16:]), weight, bias, **options)
    judged = peer_and_truth(conv2d_by_torch, dtype, x, weight, bias, **options)
    for each in (y, pair):
        assert_accurate(each, *judged)


@pytest.mark.parametrize("mean", [0.0, 1e2], ids="mean {:g}".format)
@pytest.mark.parametrize("size", [(1, 9, 7), (2, 9, 7)], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_group_norm(randn, mean, size, scaled):
    x, weight, bias = randn(*size, 24) + mean, randn(24), randn(24)
    options = {"eps": 1e-5, "activation": "silu"}
    options |= {"scale": randn(size[0], 24), "shift": randn(size[0], 24)} if scaled else {}
    y = group_norm.reference(x, 4, weight, bias, **options)
    pair = group_norm.reference((x[..., :10].contiguous(), x[..., 10:].contiguous()), 4, weight, bias, **options)
    assert torch.equal(y, pair)
    assert_accurate(y, *peer_and_truth(group_norm_by_torch, x.dtype, x, 4, weight, bias, **options))


@pytest.mark.parametrize(("mean", "calls"), [(0.0, 1), (2.0, 2), (1e3, 2), (torch.nan, 2)])
def test_pictures_with_a_large_mean_are_normalised_again(randn, monkeypatch, mean, calls):
    norms, once = [], cpu._group_norm
    monkeypatch.setattr(cpu, "_group_norm", lambda *args: norms.append(once(*args)) or norms[-1])
    y = cpu.group_norm(randn(1, 9, 7, 24) + mean, 4, None, None, 1e-5)
    assert len(norms) == calls and y is norms[0][0]


def test_a_norm_does_not_depend_on_the_other_pictures(randn):
    x = randn(3, 9, 7, 24) + torch.tensor([0.5, 3.0, 0.0])[:, None, None, None]
    y = cpu.group_norm(x, 4, None, None, 1e-5)
    for i in range(3):
        assert torch.equal(y[i : i + 1], cpu.group_norm(x[i : i + 1], 4, None, None, 1e-5))


@DTYPES
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_packed_weights_give_the_same_bits(randn, dtype, added):
    if not cpu.by_onednn(torch.ones(1, dtype=dtype)):
        pytest.skip(f"oneDNN does not compute in {dtype} on this CPU")
    for size, kernel, stride in (((1, 40, 8, 8), 3, 1), ((2, 40, 4, 4), 3, 2), ((1, 40, 8, 8), 1, 1)):
        x = randn(*size, dtype=dtype).to(memory_format=torch.channels_last)
        weight, bias = randn(24, 40, kernel, kernel, dtype=dtype), randn(24, dtype=dtype)
        y = cpu._convolution(x, weight, bias, stride, kernel // 2, None)
        args = x, weight, bias, stride, kernel // 2, randn(*y.shape, dtype=dtype) if added else None
        assert torch.equal(cpu._convolution(*cpu._convolution.pack(*args)), cpu._convolution(*args))
    for rows in (1, 50):
        args = randn(2, rows, 40, dtype=dtype), randn(24, 40, dtype=dtype), randn(24, dtype=dtype)
        other = randn(2, rows, 24, dtype=dtype)
        for rest in ((None, other), (None, other, "mul")) if added else ((None,), ("gelu",)):
            assert torch.equal(cpu._product(*cpu._product.pack(*args, *rest)), cpu._product(*args, *rest))


@pytest.fixture
def in_threads():
    """Call a function with 1, 2, 3, 4 and 8 threads, and return the results."""
    before = torch.get_num_threads()

    def call(function):
        results = []
        for threads in (1, 2, 3, 4, 8):
            torch.set_num_threads(threads)
            results.append(function())
        return results

    yield call
    torch.set_num_threads(before)


@DTYPES
def test_convolutions_and_products_do_not_depend_on_the_number_of_threads(randn, dtype, in_threads):
    if not cpu.by_onednn(torch.ones(1, dtype=dtype)):
        pytest.skip(f"oneDNN does not compute in {dtype} on this CPU")
    for pixels, channels, out in ((32, 48, 40), (16, 96, 64), (4, 256, 100)):
        x, residual = randn(1, pixels, pixels, channels, dtype=dtype), randn(1, pixels, pixels, out, dtype=dtype)
        weight, bias = randn(out, channels, 3, 3, dtype=dtype), randn(out, dtype=dtype)
        tokens, columns = x.flatten(1, 2), weight[..., 0, 0].contiguous()
        functions = (
            partial(conv2d.reference, x, weight, bias, padding=1, residual=residual),
            partial(linear.reference, tokens, columns, bias, residual=residual.flatten(1, 2)),
            partial(linear.reference, tokens, columns, bias, activation="gelu"),
            partial(geglu.reference, tokens, columns),
        )
        for function in functions:
            first, *others = in_threads(function)
            assert all(torch.equal(first, other) for other in others)


def test_small_norms_do_not_depend_on_the_number_of_threads(randn, in_threads):
    x = randn(1, 31, 33, 96)
    assert x[0].shape[:2].numel() < 1024
    first, *others = in_threads(lambda: group_norm.reference(x, 16, eps=1e-5))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_torch_computes_other_dtypes(randn, dtype):
    x, weight = randn(1, 8, 8, 40, dtype=dtype), randn(24, 40, 3, 3, dtype=dtype)
    assert not cpu.by_onednn(x)
    expected = F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1)
    assert torch.equal(conv2d.reference(x, weight, padding=1), expected)
    by_moments = group_norm.parse(x, 4, eps=1e-5)._by_moments().to(dtype)
    assert torch.equal(group_norm.reference(x, 4, eps=1e-5), by_moments)
