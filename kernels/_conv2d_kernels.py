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

from fastdiff.kernels._math import await_inputs, prefetch, tree_sum
from fastdiff.kernels._triton import tl, triton

# Run-time numbers whose divisibility is not worth a kernel variant.
SIZES = ["images", "rows", "columns", "pixels", "height", "width", "out_width", "pad_top", "pad_left", "steps"]


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
def _pixels(row, column, quarter, columns, MODE: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """(BH * BW,) index in the output picture of each pixel of a tile."""
    inner = tl.arange(0, BH * BW)
    row, column = row + inner // BW, column + inner % BW
    if MODE == "up":
        return (2 * row + quarter // 2) * (2 * columns) + 2 * column + quarter % 2
    else:
        return row * columns + column


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
    else:
        mean = tree_sum(groups, GROUPS, STATISTICS, BN) / STATISTICS
        off = groups - mean[:, None, :]
    m2 = tree_sum(off * off, GROUPS, STATISTICS, BN)
    image += group // EACH
    offset = (image.to(tl.int64) * tiles + index)[:, None] * out_channels + n[None, :]
    mask = ((image < images) & (index < tiles))[:, None] & (n < out_channels)[None, :]
    tl.store(mean_ptr + offset, mean, mask=mask)
    tl.store(m2_ptr + offset, m2, mask=mask)


@triton.jit
def _load_addend(
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
def _finish(
    y, mean_ptr, m2_ptr,
    acc, addend, residual,
    image, row, column, quarter, n0, images, columns, pixels, out_channels, scale,
    MODE: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
    STATISTICS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The epilogue: y = (acc + addend + residual) * scale and its moments, where these have pointers.

    y and the residual are descriptors where they can be: by pointers, the whole accumulator changes its layout first.
    """
    PIXELS: tl.constexpr = BH * BW
    acc = acc.reshape(BI, PIXELS, BN) + addend[:, None, :]
    n = n0 + tl.arange(0, BN)
    inside_n = n < out_channels
    each = tl.arange(0, BI)
    present = image + each < images
    pixel = _pixels(row, column, quarter, columns, MODE, BH, BW)
    base = image.to(tl.int64) * pixels * out_channels
    offset = ((each * pixels)[:, None] + pixel[None, :])[:, :, None] * out_channels + n[None, None, :]
    mask = present[:, None, None] & inside_n[None, None, :]
    if RAGGED:
        mask &= (pixel < pixels)[None, :, None]
    if isinstance(residual, tl.tensor_descriptor):
        acc += residual.load([image, row, column, n0]).reshape(BI, PIXELS, BN).to(tl.float32)
    elif residual is not None:
        acc += tl.load(residual + base + offset, mask=mask, other=0.0).to(tl.float32)
    if scale is not None:
        acc *= scale
    if not isinstance(y, tl.tensor_descriptor):
        tl.store(y + base + offset, acc.to(y.dtype.element_ty), mask=mask)
    elif MODE == "up":  # y as (N, H / 2, 2, W / 2, 2 C)
        tile = acc.to(y.dtype).reshape(BI, BH, 1, BW, BN)
        y.store([image, row, quarter // 2, column, quarter % 2 * out_channels + n0], tile)
    else:
        y.store([image, row, column, n0], acc.to(y.dtype).reshape(BI, BH, BW, BN))
    if mean_ptr is not None:
        tiles = tl.cdiv(pixels, STATISTICS)
        _store_moments(
            mean_ptr, m2_ptr, acc, image, row, column, quarter, n, images, columns, pixels, out_channels, tiles,
            MODE, BI, BH, BW, BN, STATISTICS, RAGGED,
        )  # fmt: skip


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
    images, rows, columns, pixels, pad_top, pad_left, steps, channels, channels2, shortcut_channels, shortcut_channels2,
    out_channels, temb_stride, scale,
    KH: tl.constexpr, KW: tl.constexpr, MODE: tl.constexpr, CHUNKS: tl.constexpr, SWAP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    prefetch(w_ptr, out_channels * KH * KW * (channels + channels2))
    await_inputs()
    BM: tl.constexpr = BI * BH * BW
    across = tl.cdiv(out_channels, BN)
    n = tl.program_id(0) % across * BN
    image, row, column, quarter = _locate(tl.program_id(0) // across, rows, columns, MODE, BI, BH, BW)
    top, left = quarter // 2 - pad_top, quarter % 2 - pad_left
    first = tl.program_id(1) * CHUNKS * steps
    addend = _load_addend(bias_ptr, temb_ptr, image, n, images, out_channels, temb_stride, BI, BN)
    if shortcut_bias_ptr is not None:
        addend += _load_addend(shortcut_bias_ptr, None, image, n, images, out_channels, 0, BI, BN)
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
    if not isinstance(y, tl.tensor_descriptor):
        y += tl.program_id(1).to(tl.int64) * images * pixels * out_channels
    _finish(
        y, mean_ptr, m2_ptr, acc, addend, residual, image, row, column, quarter,
        n, images, columns, pixels, out_channels, scale,
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
    addend = _load_addend(bias_ptr, temb_ptr, image, n0, images, out_channels, temb_stride, 1, BN)
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
    if not isinstance(y, tl.tensor_descriptor):
        y += tl.program_id(1).to(tl.int64) * images * pixels * out_channels
    _finish(
        y, mean_ptr, m2_ptr, acc, addend, residual, image, row, column, quarter,
        n0, images, BW, pixels, out_channels, scale, "same", 1, BH, BW, BN, BW, RAGGED,
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
    addend = _load_addend(bias_ptr, temb_ptr, image, n0, images, out_channels, temb_stride, 1, BN)
    pixel = _pixels(row, column, quarter, columns, MODE, BH, BW)
    mask = (pixel < pixels)[:, None] & (n < out_channels)[None, :]
    offset = pixel[:, None] * out_channels + n[None, :]
    partial_ptr += image.to(tl.int64) * pixels * out_channels
    acc = tl.load(partial_ptr + offset, mask=mask, other=0.0)
    for _chunk in tl.static_range(1, CHUNKS):
        partial_ptr += images.to(tl.int64) * pixels * out_channels
        acc += tl.load(partial_ptr + offset, mask=mask, other=0.0)
    _finish(
        y, mean_ptr, m2_ptr, acc, addend, residual, image, row, column, quarter,
        n0, images, columns, pixels, out_channels, scale, MODE, 1, BH, BW, BN, STATISTICS, RAGGED,
    )  # fmt: skip
