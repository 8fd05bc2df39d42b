"""The epilogue of a convolution: what is added to the sum over k, the norm, the output and its moments.

The tiles are those of `_conv2d_kernels`.
"""

from fastdiff.kernels.device.group_norm import modulate, whole_groups
from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import activate, tree_sum


@triton.jit
def pixels_of(row, column, quarter, columns, MODE: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """(BH * BW,) index in the output picture of each pixel of a tile."""
    inner = tl.arange(0, BH * BW)
    row, column = row + inner // BW, column + inner % BW
    if MODE == "up":
        return (2 * row + quarter // 2) * (2 * columns) + 2 * column + quarter % 2
    else:
        return row * columns + column


@triton.jit
def _spread(x, GROUPS: tl.constexpr, LENGTH: tl.constexpr, BN: tl.constexpr):
    """x (GROUPS, LENGTH, BN) -> its means (GROUPS, BN), what it is off them, the sums of the squares of that."""
    mean = tree_sum(x, GROUPS, LENGTH, BN) / LENGTH
    off = x - mean[:, None, :]
    return mean, off, tree_sum(off * off, GROUPS, LENGTH, BN)


@triton.jit
def _store_moments(
    mean_ptr, m2_ptr,
    acc, image, row, column, quarter, n, images, columns, pixels, out_channels, tiles,
    MODE: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
    STATISTICS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Mean and M2 of each channel over each STATISTICS pixels of acc (BI, BH * BW, BN): whole rows of the tile."""
    EACH: tl.constexpr = BH * BW // STATISTICS
    GROUPS: tl.constexpr = BI * EACH
    group = tl.arange(0, GROUPS)
    index = (row * BW // STATISTICS + group % EACH) * (columns // BW) + column // BW
    if MODE == "up":
        index += quarter * (tiles // 4)
    groups = acc.reshape(GROUPS, STATISTICS, BN)
    if RAGGED:
        count = tl.minimum(pixels - index * STATISTICS, STATISTICS)[:, None]
        inside = (tl.arange(0, STATISTICS)[None, :] < count)[:, :, None]
        mean = tree_sum(tl.where(inside, groups, 0.0), GROUPS, STATISTICS, BN) / count
        off = tl.where(inside, groups - mean[:, None, :], 0.0)
        m2 = tree_sum(off * off, GROUPS, STATISTICS, BN)
    else:
        mean, _, m2 = _spread(groups, GROUPS, STATISTICS, BN)
    image += group // EACH
    offset = (image.to(tl.int64) * tiles + index)[:, None] * out_channels + n[None, :]
    mask = ((image < images) & (index < tiles))[:, None] & (n < out_channels)[None, :]
    tl.store(mean_ptr + offset, mean, mask=mask)
    tl.store(m2_ptr + offset, m2, mask=mask)


@triton.jit
def load_addend(
    bias_ptr, temb_ptr, image, n0, images, out_channels, temb_stride, BI: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """(BI, BN) float32, bias + temb, where there are any: asked for before the main loop, it is there after it."""
    n = n0 + tl.arange(0, BN)
    inside_n = n < out_channels
    addend = tl.zeros((BI, BN), tl.float32)
    if bias_ptr is not None:
        addend += tl.load(bias_ptr + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if temb_ptr is not None:
        each = tl.arange(0, BI)
        temb_ptr += image.to(tl.int64) * temb_stride
        mask = (image + each < images)[:, None] & inside_n[None, :]
        addend += tl.load(temb_ptr + (each * temb_stride)[:, None] + n[None, :], mask=mask, other=0.0).to(tl.float32)
    return addend


@triton.jit
def _places(
    image, row, column, quarter, n0, images, columns, pixels, out_channels,
    MODE: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Of a tile (BI, BH * BW, BN) of the output: its first picture's offset, those from there, which are inside."""
    n, each = n0 + tl.arange(0, BN), tl.arange(0, BI)
    pixel = pixels_of(row, column, quarter, columns, MODE, BH, BW)
    offset = ((each * pixels)[:, None] + pixel[None, :])[:, :, None] * out_channels + n[None, None, :]
    inside = (image + each < images)[:, None, None] & (n < out_channels)[None, None, :]
    if RAGGED:
        inside &= (pixel < pixels)[None, :, None]
    return image.to(tl.int64) * pixels * out_channels, offset, inside


@triton.jit
def add(
    acc, addend, residual, scale, image, row, column, quarter, n0, images, columns, pixels, out_channels,
    MODE: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """(acc + addend + residual) * scale, (BI, BH * BW, BN), of what is there.

    The residual, like the output, is a descriptor where it can be: by pointers, the accumulator changes its layout.
    """
    PIXELS: tl.constexpr = BH * BW
    acc = acc.reshape(BI, PIXELS, BN) + addend[:, None, :]
    if isinstance(residual, tl.tensor_descriptor):
        acc += residual.load([image, row, column, n0]).reshape(BI, PIXELS, BN).to(tl.float32)
    elif residual is not None:
        base, offset, inside = _places(
            image, row, column, quarter, n0, images, columns, pixels, out_channels, MODE, BI, BH, BW, BN, RAGGED
        )
        acc += tl.load(residual + base + offset, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        acc *= scale
    return acc


@triton.jit
def store(
    y, mean_ptr, m2_ptr, acc, image, row, column, quarter, n0, images, columns, pixels, out_channels,
    MODE: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
    STATISTICS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """acc (BI, BH * BW, BN) as the output, and its moments, where these have pointers."""
    if not isinstance(y, tl.tensor_descriptor):
        base, offset, inside = _places(
            image, row, column, quarter, n0, images, columns, pixels, out_channels, MODE, BI, BH, BW, BN, RAGGED
        )
        tl.store(y + base + offset, acc.to(y.dtype.element_ty), mask=inside)
    elif MODE == "up":  # y as (N, H / 2, 2, W / 2, 2 C)
        tile = acc.to(y.dtype).reshape(BI, BH, 1, BW, BN)
        y.store([image, row, quarter // 2, column, quarter % 2 * out_channels + n0], tile)
    else:
        y.store([image, row, column, n0], acc.to(y.dtype).reshape(BI, BH, BW, BN))
    if mean_ptr is not None:
        tiles = tl.cdiv(pixels, STATISTICS)
        _store_moments(
            mean_ptr, m2_ptr, acc, image, row, column, quarter, n0 + tl.arange(0, BN), images, columns, pixels,
            out_channels, tiles, MODE, BI, BH, BW, BN, STATISTICS, RAGGED,
        )  # fmt: skip


@triton.jit
def normalise(
    acc, weight_ptr, bias_ptr, scale_ptr, shift_ptr, image, n0, images, out_channels, scale_stride, shift_stride, eps,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BI: tl.constexpr, PIXELS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """GroupNorm and activation of whole pictures, acc (BI, PIXELS, BN), in groups of WIDTH channels, all of each here.

    As in `kernels.group_norm`: a mean and M2 of each channel, merged by Chan's formula.
    """
    mean, off, m2 = _spread(acc, BI, PIXELS, BN)
    a, b = whole_groups(mean, m2, PIXELS, eps, WIDTH)
    n, row = (n0 + tl.arange(0, BN))[None, :], (image + tl.arange(0, BI)).to(tl.int64)[:, None]
    inside = n < out_channels
    a, b = modulate(
        a, b, weight_ptr, bias_ptr, scale_ptr, shift_ptr, row, n, inside, (row < images) & inside,
        scale_stride, shift_stride,
    )  # fmt: skip
    return activate(off * a[:, None, :] + b[:, None, :], ACTIVATION)
