"""to_fp8 gives the same values and scales as torch functions, in any batch. Also its results for NaN and infinity."""

import pytest
import torch

from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.to_fp8 import LONGEST, to_fp8

gpu = pytest.mark.gpu
SHAPES = {
    "tokens-N2-L40-C64": [(2, 40, 64)],
    "tokens-N1-L7-C37-odd": [(1, 7, 37)],
    "tokens-N1-L1-C1-smallest": [(1, 1, 1)],
    "tokens-N1-L3-long": [(1, 3, LONGEST + 40)],
    "pictures-N3-H4-C16": [(3, 4, 4, 16)],
    "pictures-N2-H9-C133-several-programs": [(2, 9, 9, 133)],
    "pictures-N2-H5-C9+4": [(2, 5, 5, 9), (2, 5, 5, 4)],
    "tokens-N32-L256-C4608": pytest.param([(32, 256, 4608)], marks=gpu),
    "pictures-N2-H128-C320": pytest.param([(2, 128, 128, 320)], marks=gpu),
    "pictures-N64-H16-C256+128": pytest.param([(64, 16, 16, 256), (64, 16, 16, 128)], marks=gpu),
}


@pytest.fixture
def run(runs_triton):
    return to_fp8.kernel if runs_triton else to_fp8


def given(parts):
    return parts[0] if len(parts) == 1 else tuple(parts)


def by_torch(parts):
    """Return the e4m3 values and the scales of the parts of x, computed by torch as to_fp8's docstring says.

    A scale is a float32: 1/448 of the largest magnitude, ignoring NaN, and at least 1e-30/448.
    """
    rows = [part.float().flatten(2) if part.ndim == 3 else part.float().flatten(1) for part in parts]
    largest = torch.cat(rows, dim=-1).nan_to_num(0, torch.inf, -torch.inf).abs().amax(-1)
    scale = largest.clamp(min=1e-30) * (1 / 448)
    values = [(row * (1 / scale)[..., None]).to(torch.float8_e4m3fn) for row in rows]
    return [value.view(part.shape) for value, part in zip(values, parts, strict=True)], scale


def dequantised(x, dtype=torch.float32):
    """Return x, or each tensor of a pair, rounded to e4m3."""
    parts = x if isinstance(x, tuple) else (x,)
    values, scale = by_torch(parts)
    made = [value.float() * scale.view(*scale.shape, *(1,) * (value.ndim - scale.ndim)) for value in values]
    return tuple(part.to(dtype) for part in made) if isinstance(x, tuple) else made[0].to(dtype)


def bits(scaled):
    return [each.values.view(torch.uint8) for each in scaled]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_output(shapes, dtype, randn, run):
    parts = [randn(*shape, dtype=dtype, mean=0.3) * 7 for shape in shapes]
    made, (values, scale) = run(given(parts)), by_torch(parts)
    assert all(torch.equal(each.scale, scale) and each.dtype == dtype for each in made)
    assert all(map(torch.equal, bits(made), (each.view(torch.uint8) for each in values)))
    assert [each.shape for each in made] == [part.shape for part in parts]


def test_the_largest_of_either_part_makes_the_factor_of_both(randn, run):
    small, large = randn(1, 3, 3, 4), 8 * randn(1, 3, 3, 9)
    for parts in ((small, large), (large, small)):
        made, (values, scale) = run(parts), by_torch(parts)
        assert all(torch.equal(each.scale, scale) for each in made)
        assert all(map(torch.equal, bits(made), (each.view(torch.uint8) for each in values)))


def test_is_within_half_a_step_and_reaches_the_largest(randn, run):
    x = randn(4, 9, 80)
    (made,) = run(x)
    assert made.scale.shape == (4, 9) and (made.values.float().abs().amax(-1) == 448).all()
    y = made.dequantised(torch.float32)
    assert ((y - x).abs() <= x.abs() / 16 + made.scale[..., None] * 2**-10).all()


@pytest.mark.parametrize("shape", [(3, 5, 24), (3, 5, 4, 24), (3, 9, 9, 133)], ids=["tokens", "pictures", "several"])
def test_is_the_same_in_any_batch_and_place(shape, randn, run):
    x = randn(*shape)
    (many,) = run(x)
    for i in range(3):
        (alone,) = run(x[i : i + 1] * 1)
        assert torch.equal(bits([alone])[0][0], bits([many])[0][i]) and torch.equal(alone.scale[0], many.scale[i])


def test_strided_tokens(randn, run):
    wide = randn(2, 6, 96)
    x = wide[..., 32:64]
    assert torch.equal(bits(run(x))[0], bits(run(x.contiguous()))[0])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("width", [24, LONGEST + 8], ids=["short", "long"])
def test_what_is_no_number_or_almost_nothing(width, randn, run):
    x = randn(1, 6, width)
    x[0, 0, 3], x[0, 1, 3], x[0, 2], x[0, 3], x[0, 4] = float("nan"), float("inf"), 0.0, 1e-38, 3e38
    y = run(x)[0].dequantised(torch.float32)
    assert y[0, 0].isnan().nonzero().tolist() == [[3]], "NaN stays in its element"
    assert y[0, 1].isnan().all()
    assert not y[0, 2:4].any()
    assert (y[0, 4:] - x[0, 4:]).abs().max() <= x.abs().nan_to_num(0, 0).max() / 16 and y[0, 4:].isfinite().all()
    assert torch.equal(y.nan_to_num(7.0), dequantised(x).nan_to_num(7.0))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("channels", [64, 37, 2200])
def test_layer_norm_rounds_what_it_writes_to_the_same_bits(channels, modulated, dtype, randn, runs_triton):
    x, residual = randn(3, 7, channels, dtype=dtype, mean=3.0), randn(3, 7, channels, dtype=dtype)
    x[1, 2, 3] = float("nan")
    row, table = randn(channels), randn(3, 2 * channels).chunk(2, dim=1)
    options = {"eps": 1e-5, "weight": row}
    if modulated:
        options |= {"residual": residual, "scale": table[0], "shift": table[1], "gate": table[0]}
    run, narrow = (layer_norm.kernel, to_fp8.kernel) if runs_triton else (layer_norm, to_fp8)
    fused, apart = run(x, **options, in_fp8=True), run(x, **options)
    if modulated:
        (fused, total), (apart, expected) = fused, apart
        assert torch.equal(total.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(bits([fused])[0], bits(narrow(apart))[0])
    assert torch.equal(fused.scale, narrow(apart)[0].scale) and fused.dtype == dtype


def test_a_wrong_argument_is_named():
    with pytest.raises(ValueError, match=r"^x: expected \(N, H, W, C\)"):
        to_fp8(torch.zeros(3, 4))
