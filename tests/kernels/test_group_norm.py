"""GroupNorm with scale, shift and activation compared with float64: of tensors, of pairs, and from given moments."""

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.moments import Moments
from tests.support.accuracy import peer_and_truth

SHAPES = {  # (N, H, W, C), groups
    "N2-C64-H16-unet": ((2, 16, 16, 64), 32),
    "N1-C36-H5-W7-odd": ((1, 5, 7, 36), 4),
    "N1-C2-H1-smallest": ((1, 1, 1, 2), 1),
    "N3-C3-H1-W40-one-dimension": ((3, 1, 40, 3), 3),
    "N1-C28-H12-groups-of-7": ((1, 12, 12, 28), 4),
    "N2-C28-H6-groups-of-14": ((2, 6, 6, 28), 2),
    "N2-C168-H9-groups-of-21": ((2, 9, 9, 168), 8),
    "N2-C224-H8-groups-of-28": ((2, 8, 8, 224), 8),
    "N1-C24-H24-tiles-merged": ((1, 24, 24, 24), 1),
}
REAL_SHAPES = {
    "N8-C128-H256-ddpm256": ((8, 256, 256, 128), 32),
    "N64-C128-H32-ddpm32": ((64, 32, 32, 128), 32),
    "N64-C256-H16-ddpm32": ((64, 16, 16, 256), 32),
    "N2-C320-H64-sd15": ((2, 64, 64, 320), 32),
    "N2-C1280-H8-sd15": ((2, 8, 8, 1280), 32),
    "N1-C512-H8-ddpm256": ((1, 8, 8, 512), 32),
    "N8-C224-H64-adm": ((8, 64, 64, 224), 32),
}
EPS = 1e-5
ACTIVATIONS = {"none": lambda x: x, "silu": F.silu, "mish": F.mish, "gelu": F.gelu, "relu": F.relu}


@pytest.fixture
def norm(runs_triton):
    """The operation; its kernel only, where Triton runs."""
    return group_norm.kernel if runs_triton else group_norm


def by_torch(
    x, num_groups, weight=None, bias=None, eps=EPS, activation="none", scale=None, shift=None, temb=None, residual=None
):
    """Return the operation computed by torch, in the dtype of x."""
    x = torch.cat(x, dim=-1) if isinstance(x, tuple) else x
    y = F.group_norm(x.permute(0, 3, 1, 2).contiguous(), num_groups, weight, bias, eps).permute(0, 2, 3, 1)
    y = y if scale is None else y * (1 + scale[:, None, None]) + shift[:, None, None]
    y = ACTIVATIONS[activation](y.contiguous())
    y = y if temb is None else y + temb[:, None, None]
    return y if residual is None else y + residual


def moments_of(x, pixels):
    """Return the moments of x that a convolution with tiles of `pixels` would give, computed in float64."""
    tiles = x.double().flatten(1, 2).split(pixels, dim=1)
    mean = torch.stack([tile.mean(dim=1) for tile in tiles], dim=1)
    m2 = torch.stack([(tile - tile.mean(dim=1, keepdim=True)).square().sum(dim=1) for tile in tiles], dim=1)
    return Moments(mean.float(), m2.float(), pixels)


@pytest.mark.parametrize(("shape", "groups"), SHAPES.values(), ids=SHAPES)
def test_shapes(norm, randn, dtype, assert_accurate, shape, groups):
    x, weight, bias = randn(*shape, dtype=dtype), randn(shape[-1]), randn(shape[-1])
    y = norm(x, groups, weight, bias, eps=EPS, activation="silu")
    assert y.is_contiguous()
    assert_accurate(y, *peer_and_truth(by_torch, dtype, x, groups, weight, bias, activation="silu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "groups"), REAL_SHAPES.values(), ids=REAL_SHAPES)
def test_real_shapes_several_times(norm, randn, dtype, assert_accurate, shape, groups):
    x, weight, bias = randn(*shape, dtype=dtype, mean=0.5), randn(shape[-1]), randn(shape[-1])
    torchs, truth = peer_and_truth(by_torch, dtype, x, groups, weight, bias, activation="silu")
    first = norm(x, groups, weight, bias, eps=EPS, activation="silu")
    assert_accurate(first, torchs, truth)
    for _ in range(5):
        assert torch.equal(norm(x, groups, weight, bias, eps=EPS, activation="silu"), first)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(norm, randn, dtype, assert_accurate, activation):
    x, weight, bias = 4 * randn(2, 8, 8, 32, dtype=dtype), 4 * randn(32), randn(32)
    y = norm(x, 8, weight, bias, eps=EPS, activation=activation)
    assert_accurate(y, *peer_and_truth(by_torch, dtype, x, 8, weight, bias, activation=activation))


@pytest.mark.filterwarnings("ignore:overflow")  # numpy warns of an infinite exponential in Triton's interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_huge_values_are_finite(norm, randn, activation):
    y = norm(randn(1, 4, 4, 8), 2, randn(8) * 1e4, randn(8), eps=EPS, activation=activation)
    assert y.isfinite().all()


@pytest.mark.parametrize("widths", [(24, 8), (13, 29), (40, 56)], ids=["C24+8", "C13+29-odd", "C40+56"])
def test_pair_is_its_concatenation(norm, randn, dtype, assert_accurate, widths):
    """In each pair, one group spans both tensors."""
    x = tuple(randn(2, 9, 9, width, dtype=dtype, mean=i) for i, width in enumerate(widths))
    channels = sum(widths)
    weight, bias, scale, shift = randn(channels), randn(channels), randn(2, channels), randn(2, channels)
    groups = {32: 2, 42: 6, 96: 8}[channels]
    options = {"eps": EPS, "activation": "silu", "scale": scale, "shift": shift}
    y = norm(x, groups, weight, bias, **options)
    assert_accurate(y, *peer_and_truth(by_torch, dtype, x, groups, weight, bias, **options))


ADDED = {  # H = W, channels, groups
    "C24-H16": (16, (24,), 8),
    "C30-H5-odd": (5, (30,), 6),
    "C24+16-H6-pair": (6, (24, 16), 5),
    "C24-H24-tiles-merged": (24, (24,), 1),
}


@pytest.mark.parametrize("given", [("temb",), ("residual",), ("temb", "residual")], ids="+".join)
@pytest.mark.parametrize(("height", "widths", "groups"), ADDED.values(), ids=ADDED)
def test_what_is_added_after_the_activation(norm, randn, dtype, assert_accurate, height, widths, groups, given):
    parts, channels = tuple(randn(2, height, height, width, dtype=dtype) for width in widths), sum(widths)
    x = parts if len(parts) > 1 else parts[0]
    weight, bias = randn(channels), randn(channels)
    table = randn(2, 3 * channels, dtype=dtype)[:, channels : 2 * channels]
    residual = randn(2, channels, height, height, dtype=dtype).permute(0, 2, 3, 1)
    added = {name: tensor for name, tensor in {"temb": table, "residual": residual}.items() if name in given}
    assert not any(tensor.is_contiguous() for tensor in added.values())
    y = norm(x, groups, weight, bias, eps=EPS, activation="mish", **added)
    assert_accurate(y, *peer_and_truth(by_torch, dtype, x, groups, weight, bias, activation="mish", **added))


def test_added_to_a_large_picture(norm, randn, monkeypatch, runs_triton):
    """Tiles of a large picture are merged beforehand, which gives the same bits."""
    if not runs_triton:
        pytest.skip("applies to kernels only")
    x, options = randn(2, 12, 12, 64), {"temb": randn(2, 64), "residual": randn(2, 12, 12, 64)}
    small = norm(x, 8, eps=EPS, activation="mish", **options)
    monkeypatch.setattr("fastdiff.kernels.group_norm.LARGE", 0)
    assert torch.equal(norm(x, 8, eps=EPS, activation="mish", **options), small)


@pytest.mark.parametrize("pixels", [2, 7, 16, 256], ids=["tiles-of-2", "tiles-of-7", "tiles-of-16", "one-tile"])
def test_given_moments(norm, randn, dtype, assert_accurate, pixels):
    x, weight, bias = randn(2, 16, 16, 24, dtype=dtype, mean=3.0), randn(24), randn(24)
    y = norm(x, 8, weight, bias, eps=EPS, activation="mish", moments=moments_of(x, pixels))
    assert_accurate(y, *peer_and_truth(by_torch, dtype, x, 8, weight, bias, activation="mish"))


@pytest.mark.parametrize("known", [(True, True), (True, False), (False, True)], ids=["both", "first", "second"])
def test_moments_of_a_pair(norm, randn, dtype, assert_accurate, known):
    x = (randn(2, 8, 8, 24, dtype=dtype, mean=5.0), randn(2, 8, 8, 40, dtype=dtype))
    moments = tuple(moments_of(x[i], 16 << i) if known[i] else None for i in range(2))
    y = norm(x, 4, eps=EPS, moments=moments)
    assert_accurate(y, *peer_and_truth(by_torch, dtype, x, 4))


def test_given_moments_are_used(norm, randn):
    x = randn(1, 4, 4, 8)
    mean, m2 = torch.zeros(1, 1, 8, device=x.device), torch.full((1, 1, 8), 64.0, device=x.device)
    y = norm(x, 2, eps=1e-12, moments=Moments(mean, m2, 16))
    torch.testing.assert_close(y, x / 2)


@pytest.mark.parametrize("mean", [100.0, 1000.0])
@pytest.mark.parametrize("pixels", [None, 32], ids=["own-moments", "given-moments"])
def test_large_mean(norm, randn, dtype, assert_accurate, mean, pixels):
    """x has a standard deviation of 1, and its float32 mean has an error of up to an ulp."""
    x, weight, bias = randn(2, 24, 24, 32, dtype=dtype, mean=mean), randn(32), randn(32)
    moments = None if pixels is None else moments_of(x, pixels)
    y = norm(x, 8, weight, bias, eps=EPS, activation="silu", moments=moments)
    judged = peer_and_truth(by_torch, dtype, x, 8, weight, bias, activation="silu")
    assert_accurate(y, *judged, lost=torch.finfo(torch.float32).eps * mean * weight.abs().max())


def test_channels_of_very_different_means(norm, randn, dtype, assert_accurate):
    offsets = torch.linspace(-300, 300, 32, device=randn(1).device)
    x = (randn(2, 16, 16, 32) + offsets).to(dtype)
    y = norm(x, 8, eps=EPS)
    assert_accurate(y, *peer_and_truth(by_torch, dtype, x, 8))


def test_constant_picture_is_its_bias(norm, randn, dtype):
    x, bias = torch.full((1, 8, 8, 16), 3.0, device=randn(1).device, dtype=dtype), randn(16)
    y = norm(x, 4, randn(16), bias, eps=EPS)
    torch.testing.assert_close(y, bias.to(dtype).expand_as(y), rtol=torch.finfo(dtype).eps, atol=0)


def test_non_contiguous_inputs(norm, randn, dtype, runs_triton):
    """The kernel gives the same bits."""
    base = randn(2, 6, 6, 48, dtype=dtype)
    table = randn(2, 64)
    views = {
        "channels-of-a-wider-tensor": base[..., 16:48],
        "every-second-channel": randn(2, 6, 6, 64, dtype=dtype)[..., ::2],
        "nchw": randn(2, 32, 6, 6, dtype=dtype).permute(0, 2, 3, 1),
        "crop": randn(2, 9, 9, 32, dtype=dtype)[:, 1:7, 2:8],
    }
    scale, shift = table.chunk(2, dim=1)
    for name, x in views.items():
        assert not x.is_contiguous()
        y = norm(x, 8, eps=EPS, scale=scale, shift=shift)
        copy = norm(x.contiguous(), 8, eps=EPS, scale=scale.contiguous(), shift=shift.contiguous())
        same = torch.equal(y, copy) if runs_triton else torch.allclose(y, copy, torch.finfo(dtype).eps, 1e-6)
        assert same, name


def test_parameters_in_the_dtype_of_the_model(norm, randn, dtype):
    x = randn(2, 6, 6, 16, dtype=dtype)
    rows = [randn(16, dtype=dtype), randn(16, dtype=dtype), randn(2, 16, dtype=dtype), randn(2, 16, dtype=dtype)]
    weight, bias, scale, shift = rows
    y = norm(x, 4, weight, bias, eps=EPS, scale=scale, shift=shift)
    weight, bias, scale, shift = (row.float() for row in rows)
    assert torch.equal(y, norm(x, 4, weight, bias, eps=EPS, scale=scale, shift=shift))


@pytest.mark.parametrize(
    ("height", "channels", "groups"), [(6, 64, 8), (12, 32, 2)], ids=["C64-H6", "C32-H12-tiles-merged"]
)
@pytest.mark.parametrize("most", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_picture_is_normalised_alike_in_any_batch(norm, randn, dtype, runs_triton, height, channels, groups, most):
    if not runs_triton:
        pytest.skip("on the CPU the pipeline draws one picture at a time")
    sizes = (1, most) if randn(1).device.type == "cpu" else (1, most, 64)
    x = randn(sizes[-1], height, height, channels, dtype=dtype)
    together = norm(x, groups, eps=EPS, activation="silu")
    for size in sizes:
        assert torch.equal(norm(x[:size], groups, eps=EPS, activation="silu"), together[:size])
    assert torch.equal(norm(x[-1:], groups, eps=EPS, activation="silu"), together[-1:])


@pytest.mark.parametrize("widths", [(64,), (32, 96)], ids=["C64", "C32+96-pair"])
@pytest.mark.parametrize("pixels", [8, 32], ids=["18-tiles", "5-tiles"])
def test_tiles_merged_beforehand_give_the_same_bits(norm, randn, dtype, runs_triton, monkeypatch, widths, pixels):
    if not runs_triton:
        pytest.skip("applies to kernels only")
    parts = tuple(randn(2, 12, 12, width, dtype=dtype, mean=i) for i, width in enumerate(widths))
    channels = sum(widths)
    weight, bias, scale, shift = randn(channels), randn(channels), randn(2, channels), randn(2, channels)
    known = tuple(moments_of(part, pixels) for part in parts)
    x, moments = (parts, known) if len(parts) == 2 else (parts[0], known[0])
    options = {"eps": EPS, "activation": "silu", "scale": scale, "shift": shift, "moments": moments}
    small = norm(x, 8, weight, bias, **options)
    monkeypatch.setattr("fastdiff.kernels.group_norm.LARGE", 0)
    assert torch.equal(norm(x, 8, weight, bias, **options), small)


@pytest.mark.gpu
@pytest.mark.parametrize(("height", "channels"), [(32, 128), (256, 64)], ids=["C128-H32", "C64-H256"])
def test_a_real_picture_is_normalised_alike_in_any_batch(norm, randn, dtype, height, channels):
    """In these batches, a program of the normalise pass takes one block of pixels or several."""
    x = randn(64, height, height, channels, dtype=dtype)
    together = norm(x, 32, eps=EPS, activation="silu")
    for size in (1, 3, 8):
        assert torch.equal(norm(x[:size], 32, eps=EPS, activation="silu"), together[:size])


X, ROW, TABLE = torch.zeros(2, 4, 4, 8), torch.zeros(8), torch.zeros(2, 8)
MOMENTS = Moments(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), 16)
REFUSED = {
    "three-dimensions": ((X[0], 2), {}, "x: expected"),
    "pair-of-other-sizes": (((X, X[:, :2]), 2), {}, "x: expected"),
    "pair-of-other-dtypes": (((X, X.half()), 2), {}, "x: expected one float dtype"),
    "integers": ((X.int(), 2), {}, "x: expected one float dtype"),
    "groups-that-do-not-divide": ((X, 3), {}, "num_groups: 3 does not divide the 8 channels"),
    "no-groups": ((X, 0), {}, "num_groups: 0"),
    "unknown-activation": ((X, 2), {"activation": "swish"}, "activation: 'swish'"),
    "weight-of-another-width": ((X, 2, ROW[:4], ROW), {}, "weight: expected"),
    "weight-alone": ((X, 2, ROW), {}, "weight, bias: give both"),
    "bias-on-another-device": ((X, 2, ROW, ROW.to("meta")), {}, "bias: on meta"),
    "shift-of-another-batch": ((X, 2), {"scale": TABLE, "shift": TABLE[:1]}, "shift: expected"),
    "scale-alone": ((X, 2), {"scale": TABLE}, "scale, shift: give both"),
    "temb-of-another-width": ((X, 2), {"temb": TABLE[:, :4]}, "temb: expected"),
    "residual-of-another-size": ((X, 2), {"residual": X[:, :2]}, "residual: expected"),
    "residual-in-half": ((X, 2), {"residual": X.half()}, "residual: torch.float16, but x is torch.float32"),
    "moments-of-other-tiles": ((X, 2), {"moments": MOMENTS._replace(pixels=8)}, "moments: expected"),
    "moments-in-half": ((X, 2), {"moments": MOMENTS._replace(mean=MOMENTS.mean.half())}, "moments: expected"),
    "one-for-a-pair": (((X, X), 2), {"moments": MOMENTS}, "moments: 1 for 2"),
}


@pytest.mark.parametrize(("args", "kwargs", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        group_norm(*args, **{"eps": EPS} | kwargs)
