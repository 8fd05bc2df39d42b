"""The Triton kernel of `linear` and `swiglu`: one main loop and one epilogue, loading by descriptors or by pointers.

A program makes tiles of BM tokens of one picture x BN output channels, one after the other: the loads of the next begin
while the last is finished. Every sum over the input channels has one order, whatever the tile: the tile changes no bit.
"""

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import activate, await_inputs, tree_sum

# Run-time numbers whose divisibility is not worth a kernel variant.
SIZES = ("pictures", "tokens", "gate_stride")


@triton.jit
def _place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles at a time, so that neighbours find their inputs in the L2."""
    first = tile // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inner = tile % (GROUP * column_tiles)
    return first + inner % height, inner // height


@triton.jit
def _offsets(part, row, column, rows, columns, part_stride, row_stride, BR: tl.constexpr, BC: tl.constexpr):
    """Of a (BR, BC) tile of a tensor (parts, rows, columns), and which of it are inside."""
    r, c = row + tl.arange(0, BR)[:, None], column + tl.arange(0, BC)[None, :]
    return tl.cast(part, tl.int64) * part_stride + r.to(tl.int64) * row_stride + c, (r < rows) & (c < columns)


@triton.jit
def _load(source, part, row, column, rows, columns, part_stride, row_stride, BR: tl.constexpr, BC: tl.constexpr):
    """A (BR, BC) tile of a tensor (parts, rows, columns), given as a descriptor or as a pointer; 0 outside."""
    if isinstance(source, tl.tensor_descriptor):
        tile = source.load([part, row, column]).reshape(BR, BC)
    else:
        offsets, inside = _offsets(part, row, column, rows, columns, part_stride, row_stride, BR, BC)
        tile = tl.load(source + offsets, mask=inside, other=0.0)
    return tile


@triton.jit
def _add_products(
    acc, acc2, squares, x, weight, picture, row, column, start, stop, tokens, channels, out_channels, x_picture, x_row,
    DUAL: tl.constexpr, NORMED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The accumulators after the input channels start to stop."""
    for k in tl.range(start, stop, BK):
        rows = _load(x, picture, row, k, tokens, channels, x_picture, x_row, BM, BK)
        if NORMED:
            # by way of a step in registers, or Triton (3.6 to 3.9) would count the buffers of x by this use alone, and
            # fill again what the product still reads in place
            rows = tl.where((k + tl.arange(0, BK) < channels)[None, :], rows, 0.0)
            squares += rows.to(tl.float32) * rows.to(tl.float32)
        part = out_channels * channels
        columns = _load(weight, 0, column, k, out_channels, channels, part, channels, BN, BK)
        acc = tl.dot(rows, columns.T, acc, input_precision="ieee")
        if DUAL:
            columns = _load(weight, 1, column, k, out_channels, channels, part, channels, BN, BK)
            acc2 = tl.dot(rows, columns.T, acc2, input_precision="ieee")
    return acc, acc2, squares


@triton.jit
def _add_bias(acc, bias_ptr, n, out_channels):
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < out_channels, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _finish(
    y, acc, acc2, bias_ptr, gate_ptr, residual, picture, row, column, tokens, out_channels, y_picture,
    ACTIVATION: tl.constexpr, DUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """The epilogue, BY columns at a time: what it loads and stores takes less shared memory then."""
    if BN > BY:
        tl.static_assert(not DUAL, "the second product is not cut")
        halves = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        _finish(
            y, halves[0], acc2, bias_ptr, gate_ptr, residual, picture, row, column, tokens, out_channels, y_picture,
            ACTIVATION, DUAL, BM, BN // 2, BY,
        )  # fmt: skip
        _finish(
            y, halves[1], acc2, bias_ptr, gate_ptr, residual, picture, row, column + BN // 2, tokens, out_channels,
            y_picture, ACTIVATION, DUAL, BM, BN // 2, BY,
        )  # fmt: skip
    else:
        n = column + tl.arange(0, BN)
        EXACT: tl.constexpr = not isinstance(y, tl.tensor_descriptor) and y.dtype.element_ty == tl.float32
        acc = activate(_add_bias(acc, bias_ptr, n, out_channels), ACTIVATION, EXACT)
        if DUAL:
            acc *= _add_bias(acc2, bias_ptr if bias_ptr is None else bias_ptr + out_channels, n, out_channels)
        if gate_ptr is not None:
            acc *= tl.load(gate_ptr + n, mask=n < out_channels, other=0.0).to(tl.float32)[None, :]
        if residual is not None:
            tile = _load(residual, picture, row, column, tokens, out_channels, y_picture, out_channels, BM, BN)
            acc += tile.to(tl.float32)
        if isinstance(y, tl.tensor_descriptor):
            y.store([picture, row, column], acc.to(y.dtype).reshape(1, BM, BN))
        else:
            offsets, inside = _offsets(picture, row, column, tokens, out_channels, y_picture, out_channels, BM, BN)
            tl.store(y + offsets, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def linear_kernel(
    y,
    x, weight, bias_ptr, gate_ptr, residual,
    pictures, tokens, channels, out_channels, x_picture, x_row, gate_stride, eps,
    ACTIVATION: tl.constexpr, DUAL: tl.constexpr, NORMED: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y (pictures, tokens, out_channels) of x (pictures, tokens, channels) and weight (1, out_channels, channels).

    DUAL (SwiGLU): weight is (2, out_channels, channels), and the activated first product multiplies the second.
    NORMED: x is divided by its root mean square, which is to say that its products are.
    CHUNK: so many channels are summed on their own, then added to the sum of those before; 0 for all in one.
    """
    await_inputs()
    down, across = tl.cdiv(tokens, BM), tl.cdiv(out_channels, BN)
    y_picture = tl.cast(tokens, tl.int64) * out_channels
    for tile in tl.range(tl.program_id(0), pictures * down * across, tl.num_programs(0), flatten=True):
        row_tile, column_tile = _place(tile, pictures * down, across, GROUP)
        picture, row, column = row_tile // down, row_tile % down * BM, column_tile * BN

        zeros = tl.zeros((BM, BN), tl.float32)
        acc, acc2 = zeros, zeros if DUAL else 0.0
        squares = tl.zeros((BM, BK), tl.float32) if NORMED else 0.0
        if CHUNK > 0:
            for start in range(0, channels, CHUNK):
                sums, sums2, squares = _add_products(
                    zeros, zeros if DUAL else 0.0, squares, x, weight, picture, row, column, start,
                    tl.minimum(start + CHUNK, channels), tokens, channels, out_channels, x_picture, x_row,
                    DUAL, NORMED, BM, BN, BK,
                )  # fmt: skip
                acc += sums
                acc2 += sums2
        else:
            acc, acc2, squares = _add_products(
                acc, acc2, squares, x, weight, picture, row, column, 0, channels, tokens, channels, out_channels,
                x_picture, x_row, DUAL, NORMED, BM, BN, BK,
            )  # fmt: skip

        if NORMED:
            scale = tl.rsqrt(tree_sum(squares, BM, BK, 1) / channels + eps)
            acc *= scale
            acc2 *= scale
        gates = gate_ptr if gate_ptr is None else gate_ptr + picture.to(tl.int64) * gate_stride
        _finish(
            y, acc, acc2, bias_ptr, gates, residual, picture, row, column, tokens, out_channels, y_picture,
            ACTIVATION, DUAL, BM, BN, BY,
        )  # fmt: skip
