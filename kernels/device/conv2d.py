"""The convolution's Triton kernels: two main loops, by tensor descriptors and by pointers, and one epilogue.

A program makes BM pixels x BN channels as an implicit matrix product over k = (filter tap, input channel). Its pixels
are BI pictures x BH rows x BW columns of a grid, rows x columns: the output's pixels, where MODE is "same" or "down"
(stride 2); where it is "up" (nearest 2x before the filter), those of one of the four interleaved quarters of the
output, each of which is a plain convolution of the smaller input. By pointers the grid's rows are BW consecutive
pixels, whatever row of the picture they lie in.

Bits: k is cut into chunks of `steps` steps, each summed on its own and added to the others in order. Chunks and
statistics tiles depend on the picture's shape alone; the tile, and whether one program makes all chunks or each its
own for `sum_chunks` to add up, do not change a bit.
"""

from fastdiff.kernels.device.conv2d_epilogue import add, load_addend, normalise, pixels_of, store
from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs, prefetch

# Run-time numbers whose divisibility is not worth a kernel variant.
SIZES = [
    "images", "rows", "columns", "pixels", "height", "width", "out_width", "pad_top", "pad_left", "steps",
    "norm_scale_stride", "norm_shift_stride",
]  # fmt: skip


@triton.jit
def _locate(tile, rows, columns, MODE: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """Tile index -> its first picture, row and column, and for "up" which quarter of the output it belongs to."""
    quarter = 0
    if MODE == "up":
        quarter = tile % 4
        tile = tile // 4
    across, down = columns // BW, tl.cdiv(rows, BH)
    return tile // (across * down) * BI, tile // across % down * BH, tile % across * BW, quarter


@triton.jit
def _dot(x, w, acc, SWAP: tl.constexpr):
    """acc + x w^T, or transposed: the channels on the matrix unit's M side."""
    if SWAP:
        return tl.dot(w, x.T, acc, input_precision="ieee")
    else:
        return tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit
def _sum_by_descriptors(
    acc, x_desc, w_desc, image, row, column, top, left, n, first, steps, channels, all_channels, offset,
    KH: tl.constexpr, KW: tl.constexpr, MODE: tl.constexpr, SWAP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc plus `steps` steps of the sum over k: of x's `channels`, which in the weight begin at `offset`.

    What of a tile lies outside the picture is read as zeros by the copy engine.
    """
    blocks = tl.cdiv(channels, BK)
    tap = first // blocks
    c = (first - tap * blocks) * BK
    for _ in tl.range(first, tl.minimum(first + steps, KH * KW * blocks)):
        h, w = top + tap // KW, left + tap % KW
        if MODE == "down":  # x as (N, H / 2, 2, W / 2, 2 C)
            x = x_desc.load([image, row + (h >> 1), h & 1, column + (w >> 1), (w & 1) * channels + c])
        elif MODE == "up":
            x = x_desc.load([image, row + (h >> 1), column + (w >> 1), c])
        else:
            x = x_desc.load([image, row + h, column + w, c])
        acc = _dot(x.reshape(BM, BK), w_desc.load([n, tap * all_channels + offset + c]), acc, SWAP)
        c += BK
        tap = tl.where(c < channels, tap, tap + 1)
        c = tl.where(c < channels, c, 0)
    return acc


@triton.jit
def _add_shortcut(
    acc, x_desc, x2_desc, w_desc, image, row, column, n, channels, channels2,
    SWAP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc plus a 1x1 convolution of a picture, or of a pair of them."""
    width = channels + channels2
    acc = _sum_by_descriptors(
        acc, x_desc, w_desc, image, row, column, 0, 0, n, 0, channels, channels, width, 0,
        1, 1, "same", SWAP, BM, BK,
    )  # fmt: skip
    if x2_desc is not None:
        acc = _sum_by_descriptors(
            acc, x2_desc, w_desc, image, row, column, 0, 0, n, 0, channels2, channels2, width, channels,
            1, 1, "same", SWAP, BM, BK,
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=SIZES)
def conv_by_descriptors(
    y, mean_ptr, m2_ptr,
    x_desc, x2_desc, w_desc, w_ptr, bias_ptr, temb_ptr, residual,
    shortcut_desc, shortcut2_desc, shortcut_w_desc, shortcut_bias_ptr,
    norm_weight_ptr, norm_bias_ptr, norm_scale_ptr, norm_shift_ptr, norm_scale_stride, norm_shift_stride, norm_eps,
    images, rows, columns, pixels, pad_top, pad_left, steps, channels, channels2, shortcut_channels, shortcut_channels2,
    out_channels, temb_stride, scale,
    KH: tl.constexpr, KW: tl.constexpr, MODE: tl.constexpr, CHUNKS: tl.constexpr, SWAP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STATISTICS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """NORM: the width of the groups in which the output is normalised, all pixels of a picture in a program; or 0."""
    prefetch(w_ptr, out_channels * KH * KW * (channels + channels2))
    await_inputs()
    BM: tl.constexpr = BI * BH * BW
    across = tl.cdiv(out_channels, BN)
    n = tl.program_id(0) % across * BN
    image, row, column, quarter = _locate(tl.program_id(0) // across, rows, columns, MODE, BI, BH, BW)
    top, left = quarter // 2 - pad_top, quarter % 2 - pad_left
    first = tl.program_id(1) * CHUNKS * steps
    addend = load_addend(bias_ptr, temb_ptr, image, n, images, out_channels, temb_stride, BI, BN)
    if shortcut_bias_ptr is not None:
        addend += load_addend(shortcut_bias_ptr, None, image, n, images, out_channels, 0, BI, BN)
    zeros = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    acc = _sum_by_descriptors(
        zeros, x_desc, w_desc, image, row, column, top, left, n, first, steps, channels, channels + channels2, 0,
        KH, KW, MODE, SWAP, BM, BK,
    )  # fmt: skip
    for chunk in range(1, CHUNKS):
        acc += _sum_by_descriptors(
            zeros, x_desc, w_desc, image, row, column, top, left, n, first + chunk * steps, steps, channels,
            channels + channels2, 0, KH, KW, MODE, SWAP, BM, BK,
        )  # fmt: skip
    if x2_desc is not None:
        acc = _sum_by_descriptors(
            acc, x2_desc, w_desc, image, row, column, top, left, n, 0, steps, channels2,
            channels + channels2, channels, KH, KW, MODE, SWAP, BM, BK,
        )  # fmt: skip
    if shortcut_desc is not None:
        acc = _add_shortcut(
            acc, shortcut_desc, shortcut2_desc, shortcut_w_desc, image, row, column, n, shortcut_channels,
            shortcut_channels2, SWAP, BM, BK,
        )  # fmt: skip
    if SWAP:
        acc = acc.T
    acc = add(
        acc, addend, residual, scale, image, row, column, quarter, n, images, columns, pixels, out_channels,
        MODE, BI, BH, BW, BN, False,
    )  # fmt: skip
    if NORM > 0:
        acc = normalise(
            acc, norm_weight_ptr, norm_bias_ptr, norm_scale_ptr, norm_shift_ptr, image, n, images, out_channels,
            norm_scale_stride, norm_shift_stride, norm_eps, NORM, ACTIVATION, BI, BH * BW, BN,
        )  # fmt: skip
    if not isinstance(y, tl.tensor_descriptor):
        y += tl.program_id(1).to(tl.int64) * images * pixels * out_channels
    store(
        y, mean_ptr, m2_ptr, acc, image, row, column, quarter, n, images, columns, pixels, out_channels,
        MODE, BI, BH, BW, BN, STATISTICS, False,
    )  # fmt: skip


@triton.jit
def _sum_by_pointers(
    acc, x_ptr, w_ptr, h, w, n, first, steps, height, width, channels, out_channels, all_channels, offset,
    KH: tl.constexpr, KW: tl.constexpr, MODE: tl.constexpr, FLAT: tl.constexpr, SWAP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`_sum_by_descriptors` for any sizes; h, w (BM,) are each pixel's place in the (upsampled) picture, at tap 0."""
    blocks = tl.cdiv(channels, BK)
    total = tl.cdiv(KH * KW * channels, BK) if FLAT else KH * KW * blocks
    if MODE == "up":
        tall, wide = 2 * height, 2 * width
    else:
        tall, wide = height, width
    for step in tl.range(first, tl.minimum(first + steps, total)):
        if FLAT:
            c = step * BK + tl.arange(0, BK)
            tap = c // channels
            c -= tap * channels
            inside = tap < KH * KW
            dh, dw = (tap // KW)[None, :], (tap % KW)[None, :]
        else:
            tap = step // blocks
            c = (step - tap * blocks) * BK + tl.arange(0, BK)
            inside = c < channels
            dh, dw = tap // KW, tap % KW
        row, column = h[:, None] + dh, w[:, None] + dw
        mask = (row >= 0) & (row < tall) & (column >= 0) & (column < wide) & inside[None, :]
        if MODE == "up":
            row, column = row >> 1, column >> 1
        x = tl.load(x_ptr + (row * width + column) * channels + c[None, :], mask=mask, other=0.0)
        k = tap * all_channels + offset + c
        mask = (n < out_channels)[:, None] & inside[None, :]
        weight = tl.load(w_ptr + n[:, None] * (KH * KW * all_channels) + k[None, :], mask=mask, other=0.0)
        acc = _dot(x, weight, acc, SWAP)
    return acc


@triton.jit(do_not_specialize=SIZES)
def conv_by_pointers(
    y, mean_ptr, m2_ptr,
    x_ptr, x2_ptr, w_ptr, bias_ptr, temb_ptr, residual,
    images, rows, pixels, height, width, out_width, pad_top, pad_left, steps,
    channels, channels2, out_channels, temb_stride, scale,
    KH: tl.constexpr, KW: tl.constexpr, MODE: tl.constexpr, FLAT: tl.constexpr, CHUNKS: tl.constexpr,
    SWAP: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """A tile is BH statistics tiles of BW consecutive pixels, whatever rows of the picture they lie in."""
    await_inputs()
    BM: tl.constexpr = BH * BW
    across = tl.cdiv(out_channels, BN)
    n0 = tl.program_id(0) % across * BN
    n = n0 + tl.arange(0, BN)
    image, row, column, quarter = _locate(tl.program_id(0) // across, rows, BW, "same", 1, BH, BW)
    pixel = row * BW + tl.arange(0, BM)
    h, w = pixel // out_width, pixel % out_width
    if MODE == "down":
        h, w = 2 * h, 2 * w
    h, w = h - pad_top, w - pad_left
    x_ptr += image.to(tl.int64) * height * width * channels
    first = tl.program_id(1) * CHUNKS * steps
    addend = load_addend(bias_ptr, temb_ptr, image, n0, images, out_channels, temb_stride, 1, BN)
    zeros = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    acc = _sum_by_pointers(
        zeros, x_ptr, w_ptr, h, w, n, first, steps, height, width, channels, out_channels,
        channels + channels2, 0, KH, KW, MODE, FLAT, SWAP, BK,
    )  # fmt: skip
    for chunk in range(1, CHUNKS):
        acc += _sum_by_pointers(
            zeros, x_ptr, w_ptr, h, w, n, first + chunk * steps, steps, height, width, channels, out_channels,
            channels + channels2, 0, KH, KW, MODE, FLAT, SWAP, BK,
        )  # fmt: skip
    if x2_ptr is not None:
        x2_ptr += image.to(tl.int64) * height * width * channels2
        acc = _sum_by_pointers(
            acc, x2_ptr, w_ptr, h, w, n, 0, steps, height, width, channels2, out_channels,
            channels + channels2, channels, KH, KW, MODE, FLAT, SWAP, BK,
        )  # fmt: skip
    if SWAP:
        acc = acc.T
    acc = add(
        acc, addend, residual, scale, image, row, column, quarter, n0, images, BW, pixels, out_channels,
        "same", 1, BH, BW, BN, RAGGED,
    )  # fmt: skip
    if not isinstance(y, tl.tensor_descriptor):
        y += tl.program_id(1).to(tl.int64) * images * pixels * out_channels
    store(
        y, mean_ptr, m2_ptr, acc, image, row, column, quarter, n0, images, BW, pixels, out_channels,
        "same", 1, BH, BW, BN, BW, RAGGED,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def sum_chunks(
    y, mean_ptr, m2_ptr,
    partial_ptr, bias_ptr, temb_ptr, residual,
    images, rows, columns, pixels, out_channels, temb_stride, scale,
    CHUNKS: tl.constexpr, MODE: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
    STATISTICS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The ordered sum of a spread convolution's chunks, partial (CHUNKS, N, H_out, W_out, C_out), and its epilogue."""
    await_inputs()
    across = tl.cdiv(out_channels, BN)
    n0 = tl.program_id(0) % across * BN
    n = n0 + tl.arange(0, BN)
    image, row, column, quarter = _locate(tl.program_id(0) // across, rows, columns, MODE, 1, BH, BW)
    addend = load_addend(bias_ptr, temb_ptr, image, n0, images, out_channels, temb_stride, 1, BN)
    pixel = pixels_of(row, column, quarter, columns, MODE, BH, BW)
    mask = (pixel < pixels)[:, None] & (n < out_channels)[None, :]
    offset = pixel[:, None] * out_channels + n[None, :]
    partial_ptr += image.to(tl.int64) * pixels * out_channels
    acc = tl.load(partial_ptr + offset, mask=mask, other=0.0)
    for _chunk in tl.static_range(1, CHUNKS):
        partial_ptr += images.to(tl.int64) * pixels * out_channels
        acc += tl.load(partial_ptr + offset, mask=mask, other=0.0)
    acc = add(
        acc, addend, residual, scale, image, row, column, quarter, n0, images, columns, pixels, out_channels,
        MODE, 1, BH, BW, BN, RAGGED,
    )  # fmt: skip
    store(
        y, mean_ptr, m2_ptr, acc, image, row, column, quarter, n0, images, columns, pixels, out_channels,
        MODE, 1, BH, BW, BN, STATISTICS, RAGGED,
    )  # fmt: skip
