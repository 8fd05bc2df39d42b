"""The epilogue of a convolution: bias, temb, residual, norm, the store of the output, and its moments.

`device.conv2d` describes the tiles.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.group_norm import modulate, whole_groups
from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import activate, tree_sum


class Place(NamedTuple):
    """The first element of a tile."""

    picture: Any
    row: Any
    column: Any
    quarter: Any  # the tile's quarter of the output, in an upsampling convolution
    n: Any  # channel


class Sizes(NamedTuple):
    """The sizes of the output."""

    pictures: Any
    columns: Any  # of the grid of pixels
    pixels: Any  # per picture
    out_channels: Any


class TileShape(NamedTuple):
    """The constants of a tile."""

    MODE: Any  # of the convolution: same, down or up
    BI: Any  # pictures
    BH: Any  # rows
    BW: Any  # columns
    BN: Any  # channels
    RAGGED: Any  # whether tiles reach past a picture's last pixel


@triton.jit
def pixels_of(place, columns, tile: tl.constexpr):
    """Return the index in the output picture of each pixel of a tile, (BH * BW,)."""
    inner = tl.arange(0, tile.BH * tile.BW)
    row, column = place.row + inner // tile.BW, place.column + inner % tile.BW
    if tile.MODE == "up":
        return (2 * row + place.quarter // 2) * (2 * columns) + 2 * column + place.quarter % 2
    else:
        return row * columns + column


@triton.jit
def _spread(x, GROUPS: tl.constexpr, LENGTH: tl.constexpr, BN: tl.constexpr):
    """Return the means (GROUPS, BN) of x (GROUPS, LENGTH, BN), the deviations from them, and M2 (GROUPS, BN)."""
    mean = tree_sum(x, GROUPS, LENGTH, BN) / LENGTH
    off = x - mean[:, None, :]
    return mean, off, tree_sum(off * off, GROUPS, LENGTH, BN)


@triton.jit
def _ragged_spread(x, count, GROUPS: tl.constexpr, LENGTH: tl.constexpr, BN: tl.constexpr):
    """`_spread` over the first `count` (GROUPS, 1) of LENGTH pixels; the deviations of the others are 0."""
    inside = (tl.arange(0, LENGTH)[None, :] < count)[:, :, None]
    mean = tree_sum(tl.where(inside, x, 0.0), GROUPS, LENGTH, BN) / count
    off = tl.where(inside, x - mean[:, None, :], 0.0)
    return mean, off, tree_sum(off * off, GROUPS, LENGTH, BN)


@triton.jit
def _store_moments(moments, acc, place, sizes, tile: tl.constexpr, MOMENTS: tl.constexpr):
    """Store mean and M2 per channel and MOMENTS pixels (whole rows of the tile) of acc (BI, BH * BW, BN)."""
    tiles = tl.cdiv(sizes.pixels, MOMENTS)
    n = place.n + tl.arange(0, tile.BN)
    EACH: tl.constexpr = tile.BH * tile.BW // MOMENTS
    GROUPS: tl.constexpr = tile.BI * EACH
    group = tl.arange(0, GROUPS)
    index = (place.row * tile.BW // MOMENTS + group % EACH) * (sizes.columns // tile.BW) + place.column // tile.BW
    if tile.MODE == "up":
        index += place.quarter * (tiles // 4)
    groups = acc.reshape(GROUPS, MOMENTS, tile.BN)
    if tile.RAGGED:
        count = tl.minimum(sizes.pixels - index * MOMENTS, MOMENTS)[:, None]
        mean, _, m2 = _ragged_spread(groups, count, GROUPS, MOMENTS, tile.BN)
    else:
        mean, _, m2 = _spread(groups, GROUPS, MOMENTS, tile.BN)
    picture = place.picture + group // EACH
    offset = (picture.to(tl.int64) * tiles + index)[:, None] * sizes.out_channels + n[None, :]
    mask = ((picture < sizes.pictures) & (index < tiles))[:, None] & (n < sizes.out_channels)[None, :]
    tl.store(moments[0] + offset, mean, mask=mask)
    tl.store(moments[1] + offset, m2, mask=mask)


@triton.jit
def rescale(acc, scales, place, sizes, tile: tl.constexpr, SWAP: tl.constexpr):
    """Multiply the sum over k by its `scales`, before anything is added to it.

    scales: pointers to the scale of each channel of an 8-bit weight, and to the scale of each picture of an fp8 x.
    """
    if scales[0] is not None:
        n = place.n + tl.arange(0, tile.BN)
        scale = tl.load(scales[0] + n, mask=n < sizes.out_channels, other=0.0)
        acc *= scale[:, None] if SWAP else scale[None, :]
    if scales[1] is not None:
        picture = place.picture + tl.arange(0, tile.BI * tile.BH * tile.BW) // (tile.BH * tile.BW)
        scale = tl.load(scales[1] + picture, mask=picture < sizes.pictures, other=0.0)
        acc *= scale[None, :] if SWAP else scale[:, None]
    return acc


@triton.jit
def load_addend(bias_ptr, temb_ptr, temb_stride, place, sizes, tile: tl.constexpr):
    """Return bias + temb, (BI, BN) float32, 0 for those absent. Loaded before the main loop to hide the latency."""
    n = place.n + tl.arange(0, tile.BN)
    inside_n = n < sizes.out_channels
    addend = tl.zeros((tile.BI, tile.BN), tl.float32)
    if bias_ptr is not None:
        addend += tl.load(bias_ptr + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if temb_ptr is not None:
        each = tl.arange(0, tile.BI)
        temb_ptr += place.picture.to(tl.int64) * temb_stride
        mask = (place.picture + each < sizes.pictures)[:, None] & inside_n[None, :]
        addend += tl.load(temb_ptr + (each * temb_stride)[:, None] + n[None, :], mask=mask, other=0.0).to(tl.float32)
    return addend


@triton.jit
def _places(place, sizes, tile: tl.constexpr):
    """Return the offset of a tile's first picture, the offsets from there (BI, BH * BW, BN), and a mask."""
    n, each = place.n + tl.arange(0, tile.BN), tl.arange(0, tile.BI)
    pixel = pixels_of(place, sizes.columns, tile)
    offset = ((each * sizes.pixels)[:, None] + pixel[None, :])[:, :, None] * sizes.out_channels + n[None, None, :]
    inside = (place.picture + each < sizes.pictures)[:, None, None] & (n < sizes.out_channels)[None, None, :]
    if tile.RAGGED:
        inside &= (pixel < sizes.pixels)[None, :, None]
    return place.picture.to(tl.int64) * sizes.pixels * sizes.out_channels, offset, inside


@triton.jit
def add(acc, addend, residual, scale, place, sizes, tile: tl.constexpr):
    """Return (acc + addend + residual) * scale, (BI, BH * BW, BN); residual and scale are optional.

    The residual, like the output, is a descriptor where possible: with pointers the accumulator changes its layout.
    """
    PIXELS: tl.constexpr = tile.BH * tile.BW
    acc = acc.reshape(tile.BI, PIXELS, tile.BN) + addend[:, None, :]
    if isinstance(residual, tl.tensor_descriptor):
        loaded = residual.load([place.picture, place.row, place.column, place.n])
        acc += loaded.reshape(tile.BI, PIXELS, tile.BN).to(tl.float32)
    elif residual is not None:
        base, offset, inside = _places(place, sizes, tile)
        acc += tl.load(residual + base + offset, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        acc *= scale
    return acc


@triton.jit
def store(y, moments, acc, place, sizes, tile: tl.constexpr, MOMENTS: tl.constexpr):
    """Store acc (BI, BH * BW, BN) as the output and, if `moments` has pointers, its moments per MOMENTS pixels."""
    if not isinstance(y, tl.tensor_descriptor):
        base, offset, inside = _places(place, sizes, tile)
        tl.store(y + base + offset, acc.to(y.dtype.element_ty), mask=inside)
    elif tile.MODE == "up":  # y as (N, H / 2, 2, W / 2, 2 C)
        block = acc.to(y.dtype).reshape(tile.BI, tile.BH, 1, tile.BW, tile.BN)
        down, across = place.quarter // 2, place.quarter % 2
        y.store([place.picture, place.row, down, place.column, across * sizes.out_channels + place.n], block)
    else:
        block = acc.to(y.dtype).reshape(tile.BI, tile.BH, tile.BW, tile.BN)
        y.store([place.picture, place.row, place.column, place.n], block)
    if moments is not None:
        _store_moments(moments, acc, place, sizes, tile, MOMENTS)


@triton.jit
def normalise(acc, affine, place, sizes, tile: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """Apply GroupNorm and activation to whole pictures, acc (BI, BH * BW, BN), with whole groups of WIDTH channels.

    As in `kernels.group_norm`, each channel's mean and M2 are merged by Chan's formula.
    """
    PIXELS: tl.constexpr = tile.BH * tile.BW
    if tile.RAGGED:
        count = tl.full((tile.BI, 1), 0, tl.int32) + sizes.pixels
        mean, off, m2 = _ragged_spread(acc, count, tile.BI, PIXELS, tile.BN)
        a, b = whole_groups(mean, m2, sizes.pixels, affine.eps, WIDTH)
    else:
        mean, off, m2 = _spread(acc, tile.BI, PIXELS, tile.BN)
        a, b = whole_groups(mean, m2, PIXELS, affine.eps, WIDTH)
    n = (place.n + tl.arange(0, tile.BN))[None, :]
    row = (place.picture + tl.arange(0, tile.BI)).to(tl.int64)[:, None]
    inside = n < sizes.out_channels
    a, b = modulate(a, b, affine, row, n, inside, (row < sizes.pictures) & inside)
    return activate(off * a[:, None, :] + b[:, None, :], ACTIVATION)
