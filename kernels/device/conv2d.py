"""The Triton kernels of the convolution: two main loops, with tensor descriptors and with pointers, and one epilogue.

A program computes a tile of BM pixels x BN channels as an implicit GEMM over k = (filter tap, input channel). The
pixels of a tile are BI pictures x BH rows x BW columns of a grid of rows x columns. If MODE is "same" or "down"
(stride 2), the grid is the output. If MODE is "up" (nearest 2x before the filter), the grid is one of the four
interleaved quarters of the output; each quarter is a plain convolution of the smaller input. With pointers, a row of
the grid is BW consecutive pixels, which may cross rows of the picture.

Bits: k is cut into chunks of `steps` steps. Each chunk is summed from zero, and chunks are added in order. Chunks and
the tiles of moments depend only on the picture's shape. Neither the tile nor the split of chunks changes a bit. One
program may compute all chunks of a tile, or each chunk may have its own program. Then `sum_chunks` adds them, or the
program of a tile that arrives last.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.arrivals import arrives_last, load_part, sum_of_parts
from fastdiff.kernels.device.conv2d_epilogue import (
    Place,
    Sizes,
    TileShape,
    add,
    load_addend,
    normalise,
    pixels_of,
    rescale,
    store,
)
from fastdiff.kernels.device.group_norm import Affine
from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs, prefetch

# Run-time arguments not worth a kernel variant for their divisibility. Inside a tuple they would be specialised.
SIZES = [
    "pictures", "rows", "columns", "pixels", "height", "width", "out_width", "pad_top", "pad_left", "steps",
    "norm_scale_stride", "norm_shift_stride", "norm_temb_stride",
]  # fmt: skip


class Source(NamedTuple):
    """An input of the sum over k: a descriptor or pointer, and where its channels start in the weight."""

    x: Any
    channels: Any
    offset: Any  # of its first channel in the weight


class Weight(NamedTuple):
    """The weight, (out_channels, KH, KW, channels), or as `Loop.K_FIRST` says, by descriptor or pointer."""

    w: Any
    channels: Any  # of all inputs


class Loop(NamedTuple):
    """The constants of a main loop."""

    KH: Any
    KW: Any
    MODE: Any
    SWAP: Any  # output channels are the M dimension of the matrix product
    BI: Any
    BM: Any
    BN: Any
    BK: Any
    FLAT: Any  # with pointers: a step may span taps; otherwise it has channels of one tap
    K_FIRST: Any  # with pointers: the weight's memory is (KH, KW, channels, out_channels)


@triton.jit
def _locate(tile, rows, columns, n, shape: tl.constexpr):
    """Return the `Place` of the tile with this index."""
    quarter = 0
    if shape.MODE == "up":
        quarter = tile % 4
        tile = tile // 4
    across, down = columns // shape.BW, tl.cdiv(rows, shape.BH)
    picture, row = tile // (across * down) * shape.BI, tile // across % down * shape.BH
    return Place(picture, row, tile % across * shape.BW, quarter, n)


@triton.jit
def _dot(x, w, acc, SWAP: tl.constexpr):
    """Return acc + x w^T, or with SWAP its transpose, with output channels as the M dimension.

    w may be int8, or both operands fp8. Tensor cores sum fp8 products in 14 bits, so only those of one step are summed
    there.
    """
    w = w.to(x.dtype)
    if x.dtype == tl.float8e4nv:
        K: tl.constexpr = x.shape[1]
        products = tl.dot(w, x.T, max_num_imprecise_acc=K) if SWAP else tl.dot(x, w.T, max_num_imprecise_acc=K)
        return acc + products
    elif SWAP:
        return tl.dot(w, x.T, acc, input_precision="ieee")
    else:
        return tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit
def _step_by_descriptors(acc, source, weight, place, top, left, tap, c, loop: tl.constexpr):
    """Return acc plus the step of a tap and BK channels from c on, and the tap and the channel of the next step.

    TMA reads zeros where a tile lies outside the picture.
    """
    h, w = top + tap // loop.KW, left + tap % loop.KW
    row, column = place.row, place.column
    if loop.MODE == "down":  # x as (N, H / 2, 2, W / 2, 2 C)
        x = source.x.load([place.picture, row + (h >> 1), h & 1, column + (w >> 1), (w & 1) * source.channels + c])
    elif loop.MODE == "up":
        x = source.x.load([place.picture, row + (h >> 1), column + (w >> 1), c])
    else:
        x = source.x.load([place.picture, row + h, column + w, c])
    x = x.reshape(loop.BM, loop.BK)
    acc = _dot(x, weight.w.load([place.n, tap * weight.channels + source.offset + c]), acc, loop.SWAP)
    c += loop.BK
    tap = tl.where(c < source.channels, tap, tap + 1)
    return acc, tap, tl.where(c < source.channels, c, 0)


@triton.jit
def _sum_by_descriptors(acc, source, weight, place, top, left, first, steps, loop: tl.constexpr):
    """Return acc plus `steps` steps of the sum over k, from step `first` on."""
    blocks = tl.cdiv(source.channels, loop.BK)
    tap = first // blocks
    c = (first - tap * blocks) * loop.BK
    for _ in tl.range(first, tl.minimum(first + steps, loop.KH * loop.KW * blocks)):
        acc, tap, c = _step_by_descriptors(acc, source, weight, place, top, left, tap, c, loop)
    return acc


@triton.jit
def _sum_chunks_by_descriptors(total, source, weight, place, top, left, steps, loop: tl.constexpr):
    """Return total plus the chunks of the sum over k, of `steps` steps each, in one loop whose loads do not pause."""
    zeros = tl.zeros((loop.BN, loop.BM) if loop.SWAP else (loop.BM, loop.BN), tl.float32)
    acc, tap, c, left_over = zeros, 0, 0, steps
    for _ in tl.range(0, loop.KH * loop.KW * tl.cdiv(source.channels, loop.BK)):
        acc, tap, c = _step_by_descriptors(acc, source, weight, place, top, left, tap, c, loop)
        left_over -= 1
        if left_over == 0:
            total += acc
            acc = zeros
            left_over = steps
    return total + acc


@triton.jit
def _add_shortcut(acc, descs, place, shortcut, steps, loop: tl.constexpr, BK: tl.constexpr):
    """Return acc plus a 1x1 convolution of an input or a pair of inputs: BK channels per step, at most `steps` of each.

    descs: of the inputs, the second of which may be None, and of the weight. shortcut: as in `conv_by_descriptors`.
    """
    channels, channels2 = shortcut[1], shortcut[2]
    plain: tl.constexpr = Loop(1, 1, "same", loop.SWAP, loop.BI, loop.BM, loop.BN, BK, False, False)
    weight = Weight(descs[2], channels + channels2)
    acc = _sum_by_descriptors(acc, Source(descs[0], channels, 0), weight, place, 0, 0, 0, steps, plain)
    if descs[1] is not None:
        source = Source(descs[1], channels2, channels)
        acc = _sum_by_descriptors(acc, source, weight, place, 0, 0, 0, steps, plain)
    return acc


@triton.jit
def _part_by_descriptors(
    source, source2, weight, place, top, left, steps, shortcut_descs, shortcut, loop: tl.constexpr,
    CHUNKS: tl.constexpr, SHORTCUT_BK: tl.constexpr,
):  # fmt: skip
    """Return the part of the sum that this program computes: a chunk of an input, or after these the shortcut.

    The loops over other parts are empty. In the branches of an `if`, each loop would have its own shared memory.
    """
    part = tl.program_id(1)
    acc = tl.zeros((loop.BN, loop.BM) if loop.SWAP else (loop.BM, loop.BN), tl.float32)
    acc = _sum_by_descriptors(acc, source, weight, place, top, left, part * steps, steps, loop)
    if source2.x is not None:
        first = tl.where(part < CHUNKS, CHUNKS, part - CHUNKS) * steps
        acc = _sum_by_descriptors(acc, source2, weight, place, top, left, first, steps, loop)
    if shortcut_descs[0] is not None:
        count = tl.where(part == (CHUNKS if source2.x is None else 2 * CHUNKS), shortcut[1] + shortcut[2], 0)
        acc = _add_shortcut(acc, shortcut_descs, place, shortcut, count, loop, SHORTCUT_BK)
    return acc


@triton.jit(do_not_specialize=SIZES)
def conv_by_descriptors(
    y, moments, partial_ptr, arrived_ptr, x_desc, x2_desc, w_desc, w_ptr, scales, residual,
    shortcut_desc, shortcut2_desc, shortcut_w_desc, shortcut, epilogue,
    norm, norm_scale_stride, norm_shift_stride, norm_temb, norm_residual, norm_temb_stride,
    pictures, rows, columns, pixels, pad_top, pad_left, steps, channels, channels2, out_channels,
    KH: tl.constexpr, KW: tl.constexpr, MODE: tl.constexpr, CHUNKS: tl.constexpr, SWAP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MOMENTS: tl.constexpr,
    SHORTCUT_BK: tl.constexpr, APART: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the convolution, loading with tensor descriptors.

    APART: y is the program's chunk, for `sum_chunks`.

    NORM: the group width of the norm in the epilogue, for which a program holds all pixels of a picture; or 0.
    partial_ptr, arrived_ptr: see `arrives_last`, if each part of the sum has its own program; otherwise None.
    scales: see `rescale`.
    moments: pointers to mean and M2. epilogue: pointers to bias and temb, the stride of temb, the scale.
    shortcut: pointer to its bias, and the channels of its one or two inputs. norm: the first five of `Affine`.
    norm_temb and norm_residual are added after the norm's activation.
    """
    prefetch(w_ptr, out_channels * KH * KW * (channels + channels2))
    await_inputs()
    BM: tl.constexpr = BI * BH * BW
    tile: tl.constexpr = TileShape(MODE, BI, BH, BW, BN, False)
    loop: tl.constexpr = Loop(KH, KW, MODE, SWAP, BI, BM, BN, BK, False, False)
    sizes = Sizes(pictures, columns, pixels, out_channels)
    across = tl.cdiv(out_channels, BN)
    n = tl.program_id(0) % across * BN
    place = _locate(tl.program_id(0) // across, rows, columns, n, tile)
    top, left = place.quarter // 2 - pad_top, place.quarter % 2 - pad_left
    addend = load_addend(epilogue[0], epilogue[1], epilogue[2], place, sizes, tile)
    if shortcut[0] is not None:
        addend += load_addend(shortcut[0], None, 0, place, sizes, tile)
    after = load_addend(None, norm_temb, norm_temb_stride, place, sizes, tile)
    zeros = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    shortcut_descs = (shortcut_desc, shortcut2_desc, shortcut_w_desc)
    source, source2 = Source(x_desc, channels, 0), Source(x2_desc, channels2, channels)
    weight = Weight(w_desc, channels + channels2)
    SUMS: tl.constexpr = CHUNKS if x2_desc is None else 2 * CHUNKS
    PARTS: tl.constexpr = SUMS if shortcut_descs[0] is None else SUMS + 1
    all_steps = 0 if shortcut_descs[0] is None else shortcut[1] + shortcut[2]
    if APART:
        acc = _sum_by_descriptors(zeros, source, weight, place, top, left, tl.program_id(1) * steps, steps, loop)
    elif partial_ptr is not None:
        acc = _part_by_descriptors(
            source, source2, weight, place, top, left, steps, shortcut_descs, shortcut, loop, CHUNKS, SHORTCUT_BK
        )
        if not arrives_last(partial_ptr, arrived_ptr, acc, PARTS):
            return
        acc = rescale(sum_of_parts(partial_ptr, acc, SUMS, PARTS), scales, place, sizes, tile, SWAP)
        if shortcut_descs[0] is not None:
            acc += load_part(partial_ptr, acc, SUMS, PARTS)
    elif CHUNKS > 1:
        acc = _sum_chunks_by_descriptors(zeros, source, weight, place, top, left, steps, loop)
        if x2_desc is not None:
            acc = _sum_chunks_by_descriptors(acc, source2, weight, place, top, left, steps, loop)
        acc = rescale(acc, scales, place, sizes, tile, SWAP)
        if shortcut_descs[0] is not None:
            acc += _add_shortcut(zeros, shortcut_descs, place, shortcut, all_steps, loop, SHORTCUT_BK)
    else:
        acc = _sum_by_descriptors(zeros, source, weight, place, top, left, 0, steps, loop)
        if x2_desc is not None:
            acc = _sum_by_descriptors(acc, source2, weight, place, top, left, 0, steps, loop)
        acc = rescale(acc, scales, place, sizes, tile, SWAP)
        if shortcut_descs[0] is not None:
            acc = _add_shortcut(acc, shortcut_descs, place, shortcut, all_steps, loop, SHORTCUT_BK)
    if SWAP:
        acc = acc.T
    acc = add(acc, addend, residual, epilogue[3], place, sizes, tile)
    if NORM > 0:
        affine = Affine(norm[0], norm[1], norm[2], norm[3], norm[4], norm_scale_stride, norm_shift_stride)
        acc = normalise(acc, affine, place, sizes, tile, NORM, ACTIVATION)
    if norm_temb is not None or norm_residual is not None:
        acc = add(acc, after, norm_residual, None, place, sizes, tile)
    if APART:
        y += tl.program_id(1).to(tl.int64) * pictures * pixels * out_channels
    store(y, moments, acc, place, sizes, tile, MOMENTS)


@triton.jit
def _sum_by_pointers(acc, source, weight, h, w, n, first, steps, height, width, out_channels, loop: tl.constexpr):
    """`_sum_by_descriptors` for any size. h, w (BM,): each pixel's position in the (upsampled) picture at tap 0.

    source.x points to the first of the tile's BI pictures.
    """
    channels = source.channels
    KH: tl.constexpr = loop.KH
    KW: tl.constexpr = loop.KW
    blocks = tl.cdiv(channels, loop.BK)
    total = tl.cdiv(KH * KW * channels, loop.BK) if loop.FLAT else KH * KW * blocks
    if loop.MODE == "up":
        tall, wide = 2 * height, 2 * width
    else:
        tall, wide = height, width
    for step in tl.range(first, tl.minimum(first + steps, total)):
        if loop.FLAT:
            c = step * loop.BK + tl.arange(0, loop.BK)
            tap = c // channels
            c -= tap * channels
            inside = tap < KH * KW
            dh, dw = (tap // KW)[None, :], (tap % KW)[None, :]
        else:
            tap = step // blocks
            c = (step - tap * blocks) * loop.BK + tl.arange(0, loop.BK)
            inside = c < channels
            dh, dw = tap // KW, tap % KW
        row, column = h[:, None] + dh, w[:, None] + dw
        mask = (row >= 0) & (row < tall) & (column >= 0) & (column < wide) & inside[None, :]
        if loop.MODE == "up":
            row, column = row >> 1, column >> 1
        if loop.BI > 1:
            row += (tl.arange(0, loop.BM) // (loop.BM // loop.BI) * height)[:, None]
        x = tl.load(source.x + (row * width + column) * channels + c[None, :], mask=mask, other=0.0)
        k = tap * weight.channels + source.offset + c
        if loop.K_FIRST:
            mask = inside[:, None] & (n < out_channels)[None, :]
            filters = tl.load(weight.w + k[:, None] * out_channels + n[None, :], mask=mask, other=0.0).T
        else:
            mask = (n < out_channels)[:, None] & inside[None, :]
            w_ptrs = weight.w + n[:, None] * (KH * KW * weight.channels) + k[None, :]
            filters = tl.load(w_ptrs, mask=mask, other=0.0)
        acc = _dot(x, filters, acc, loop.SWAP)
    return acc


@triton.jit(do_not_specialize=SIZES)
def conv_by_pointers(
    y, moments, x_ptr, x2_ptr, w_ptr, scales, residual, epilogue,
    norm, norm_scale_stride, norm_shift_stride, norm_temb, norm_residual, norm_temb_stride,
    pictures, rows, pixels, height, width, out_width, pad_top, pad_left, steps, channels, channels2, out_channels,
    KH: tl.constexpr, KW: tl.constexpr, MODE: tl.constexpr, FLAT: tl.constexpr, CHUNKS: tl.constexpr,
    SWAP: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    K_FIRST: tl.constexpr, RAGGED: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the convolution, loading with pointers.

    The tile is BH tiles of moments, each of BW consecutive pixels, which may cross rows of the picture. If BI > 1, it
    covers BI whole pictures. scales, moments, epilogue, NORM and its arguments are as in `conv_by_descriptors`.
    """
    await_inputs()
    BM: tl.constexpr = BI * BH * BW
    tile: tl.constexpr = TileShape("same", BI, BH, BW, BN, RAGGED)
    loop: tl.constexpr = Loop(KH, KW, MODE, SWAP, BI, BM, BN, BK, FLAT, K_FIRST)
    sizes = Sizes(pictures, BW, pixels, out_channels)
    across = tl.cdiv(out_channels, BN)
    n0 = tl.program_id(0) % across * BN
    n = n0 + tl.arange(0, BN)
    place = _locate(tl.program_id(0) // across, rows, BW, n0, tile)
    pixel = place.row * BW + tl.arange(0, BM) % (BH * BW)
    h, w = pixel // out_width, pixel % out_width
    if MODE == "down":
        h, w = 2 * h, 2 * w
    h, w = h - pad_top, w - pad_left
    if BI > 1:  # mask pictures beyond the batch: none of their rows is inside
        h = tl.where(place.picture + tl.arange(0, BM) // (BH * BW) < pictures, h, -KH)
    x_ptr += place.picture.to(tl.int64) * height * width * channels
    first = tl.program_id(1) * CHUNKS * steps
    addend = load_addend(epilogue[0], epilogue[1], epilogue[2], place, sizes, tile)
    after = load_addend(None, norm_temb, norm_temb_stride, place, sizes, tile)
    zeros = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    source, weight = Source(x_ptr, channels, 0), Weight(w_ptr, channels + channels2)
    acc = _sum_by_pointers(zeros, source, weight, h, w, n, first, steps, height, width, out_channels, loop)
    for chunk in range(1, CHUNKS):
        start = first + chunk * steps
        acc += _sum_by_pointers(zeros, source, weight, h, w, n, start, steps, height, width, out_channels, loop)
    if x2_ptr is not None:
        x2_ptr += place.picture.to(tl.int64) * height * width * channels2
        source2 = Source(x2_ptr, channels2, channels)
        acc = _sum_by_pointers(acc, source2, weight, h, w, n, 0, steps, height, width, out_channels, loop)
    acc = rescale(acc, scales, place, sizes, tile, SWAP)
    if SWAP:
        acc = acc.T
    acc = add(acc, addend, residual, epilogue[3], place, sizes, tile)
    if NORM > 0:
        affine = Affine(norm[0], norm[1], norm[2], norm[3], norm[4], norm_scale_stride, norm_shift_stride)
        acc = normalise(acc, affine, place, sizes, tile, NORM, ACTIVATION)
    if norm_temb is not None or norm_residual is not None:
        acc = add(acc, after, norm_residual, None, place, sizes, tile)
    if not isinstance(y, tl.tensor_descriptor):
        y += tl.program_id(1).to(tl.int64) * pictures * pixels * out_channels
    store(y, moments, acc, place, sizes, tile, BW)


@triton.jit(do_not_specialize=SIZES)
def sum_chunks(
    y, moments, partial_ptr, scales, residual, epilogue, pictures, rows, columns, pixels, out_channels,
    CHUNKS: tl.constexpr, MODE: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
    MOMENTS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Sum the chunks of a spread convolution, (CHUNKS, N, H_out, W_out, C_out), in order, and run its epilogue.

    scales, moments, epilogue: as in `conv_by_descriptors`.
    """
    await_inputs()
    tile: tl.constexpr = TileShape(MODE, 1, BH, BW, BN, RAGGED)
    sizes = Sizes(pictures, columns, pixels, out_channels)
    across = tl.cdiv(out_channels, BN)
    n0 = tl.program_id(0) % across * BN
    n = n0 + tl.arange(0, BN)
    place = _locate(tl.program_id(0) // across, rows, columns, n0, tile)
    addend = load_addend(epilogue[0], epilogue[1], epilogue[2], place, sizes, tile)
    pixel = pixels_of(place, columns, tile)
    mask = (pixel < pixels)[:, None] & (n < out_channels)[None, :]
    offset = pixel[:, None] * out_channels + n[None, :]
    partial_ptr += place.picture.to(tl.int64) * pixels * out_channels
    acc = tl.load(partial_ptr + offset, mask=mask, other=0.0)
    for _chunk in tl.static_range(1, CHUNKS):
        partial_ptr += pictures.to(tl.int64) * pixels * out_channels
        acc += tl.load(partial_ptr + offset, mask=mask, other=0.0)
    acc = rescale(acc, scales, place, sizes, tile, False)
    acc = add(acc, addend, residual, epilogue[3], place, sizes, tile)
    store(y, moments, acc, place, sizes, tile, MOMENTS)
