"""The Triton kernel of `linear`, `swiglu` and `geglu`: one main loop and one epilogue.

Loads use descriptors or pointers.

The kernel is persistent: a program computes one tile after another, each of BM tokens of one picture x BN output
channels, and starts the loads of the next tile during the epilogue of the last. Every sum over input channels has the
same order in every tile, so tiles do not change a bit.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import activate, await_inputs, tree_sum

# Run-time arguments not worth a kernel variant for their divisibility.
SIZES = ("pictures", "tokens", "gate_stride")


class Matrix(NamedTuple):
    """A tensor (parts, rows, columns), as a descriptor or a pointer; columns are contiguous."""

    source: Any
    rows: Any
    columns: Any
    part_stride: Any
    row_stride: Any


class Place(NamedTuple):
    """The first element of a tile of the output."""

    picture: Any
    row: Any
    column: Any


class Affine(NamedTuple):
    """Pointers to the per-channel scale and bias; None if absent."""

    scale: Any  # of an 8-bit weight
    bias: Any


class Sums(NamedTuple):
    """The sums of a tile over the input channels."""

    acc: Any  # (BM, BN) products
    acc2: Any  # (BM, BN) products with the second weight, if any
    squares: Any  # (BM, BK) of the inputs, if they are normalised


class TileShape(NamedTuple):
    """The constants of a tile."""

    DUAL: Any
    NORMED: Any
    BM: Any  # tokens
    BN: Any  # output channels
    BK: Any  # input channels per step


@triton.jit
def _place(tile, row_tiles, column_tiles, GROUP_M: tl.constexpr):
    """Return a tile's row and column, GROUP_M rows of tiles at a time so that neighbours share inputs in the L2."""
    first = tile // (GROUP_M * column_tiles) * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    inner = tile % (GROUP_M * column_tiles)
    return first + inner % height, inner // height


@triton.jit
def _offsets(matrix, part, row, column, BR: tl.constexpr, BC: tl.constexpr):
    """Return the offsets of a (BR, BC) tile of a matrix, and its mask."""
    r, c = row + tl.arange(0, BR)[:, None], column + tl.arange(0, BC)[None, :]
    offsets = tl.cast(part, tl.int64) * matrix.part_stride + r.to(tl.int64) * matrix.row_stride + c
    return offsets, (r < matrix.rows) & (c < matrix.columns)


@triton.jit
def _load(matrix, part, row, column, BR: tl.constexpr, BC: tl.constexpr):
    """Load a (BR, BC) tile of a matrix; 0 outside."""
    if isinstance(matrix.source, tl.tensor_descriptor):
        tile = matrix.source.load([part, row, column]).reshape(BR, BC)
    else:
        offsets, inside = _offsets(matrix, part, row, column, BR, BC)
        tile = tl.load(matrix.source + offsets, mask=inside, other=0.0)
    return tile


@triton.jit
def _dot(rows, columns, acc):
    """Return acc + rows columns^T. The columns may be int8, or both operands fp8."""
    columns = columns.to(rows.dtype)
    if rows.dtype == tl.float8e4nv:  # tensor cores sum fp8 products in 14 bits: only within a step
        return acc + tl.dot(rows, columns.T, max_num_imprecise_acc=rows.shape[1])
    else:
        return tl.dot(rows, columns.T, acc, input_precision="ieee")


@triton.jit
def _add_products(sums, x, weight, out_channels, place, start, stop, shape: tl.constexpr):
    """Return the sums after input channels start to stop."""
    acc, acc2, squares = sums.acc, sums.acc2, sums.squares
    for k in tl.range(start, stop, shape.BK):
        rows = _load(x, place.picture, place.row, k, shape.BM, shape.BK)
        if shape.NORMED:
            # without this step in registers, Triton (3.6 to 3.9) counts the buffers of x by this use alone, and refills
            # buffers that the product still reads in place
            rows = tl.where((k + tl.arange(0, shape.BK) < x.columns)[None, :], rows, 0.0)
            squares += rows.to(tl.float32) * rows.to(tl.float32)
        weights = Matrix(weight, out_channels, x.columns, out_channels * x.columns, x.columns)
        columns = _load(weights, 0, place.column, k, shape.BN, shape.BK)
        acc = _dot(rows, columns, acc)
        if shape.DUAL:
            columns = _load(weights, 1, place.column, k, shape.BN, shape.BK)
            acc2 = _dot(rows, columns, acc2)
    return Sums(acc, acc2, squares)


@triton.jit
def _apply(affine, acc, n, inside):
    if affine.scale is not None:
        acc *= tl.load(affine.scale + n, mask=inside, other=0.0)[None, :]
    if affine.bias is not None:
        acc += tl.load(affine.bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _finish(
    y, acc, acc2, affine, gate_ptr, residual, place,
    ACTIVATION: tl.constexpr, ACTIVATION2: tl.constexpr, DUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Run the epilogue BY columns at a time, so that its loads and stores need less shared memory."""
    if BN > BY:
        tl.static_assert(not DUAL, "the second product is not cut")
        half: tl.constexpr = BN // 2
        halves = acc.reshape(BM, 2, half).permute(0, 2, 1).split()
        _finish(y, halves[0], acc2, affine, gate_ptr, residual, place, ACTIVATION, ACTIVATION2, DUAL, BM, half, BY)
        right = Place(place.picture, place.row, place.column + half)
        _finish(y, halves[1], acc2, affine, gate_ptr, residual, right, ACTIVATION, ACTIVATION2, DUAL, BM, half, BY)
    else:
        out_channels, picture, row, column = y.columns, place.picture, place.row, place.column
        n = column + tl.arange(0, BN)
        EXACT: tl.constexpr = not isinstance(y.source, tl.tensor_descriptor) and y.source.dtype.element_ty == tl.float32
        acc = activate(_apply(affine, acc, n, n < out_channels), ACTIVATION, EXACT)
        if DUAL:
            # the second product's channels follow the first's
            acc *= activate(_apply(affine, acc2, out_channels + n, n < out_channels), ACTIVATION2, EXACT)
        if gate_ptr is not None:
            acc *= tl.load(gate_ptr + n, mask=n < out_channels, other=0.0).to(tl.float32)[None, :]
        if residual.source is not None:
            acc += _load(residual, picture, row, column, BM, BN).to(tl.float32)
        if isinstance(y.source, tl.tensor_descriptor):
            y.source.store([picture, row, column], acc.to(y.source.dtype).reshape(1, BM, BN))
        else:
            offsets, inside = _offsets(y, picture, row, column, BM, BN)
            tl.store(y.source + offsets, acc.to(y.source.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def linear_kernel(
    y,
    x, weight, x_scale_ptr, scale_ptr, bias_ptr, gate_ptr, residual,
    pictures, tokens, channels, out_channels, x_picture, x_row, gate_stride, eps,
    ACTIVATION: tl.constexpr, ACTIVATION2: tl.constexpr, DUAL: tl.constexpr, NORMED: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """y (pictures, tokens, out_channels) from x (pictures, tokens, channels) and weight (1, out_channels, channels).

    DUAL (SwiGLU, GEGLU): weight is (2, out_channels, channels); y is ACTIVATION of the first product times ACTIVATION2
    of the second.
    scale_ptr: the scale of each output channel of an 8-bit weight. x_scale_ptr: the scale of each token of an fp8 x.
    NORMED: x is divided by its root mean square; the division is applied to the products.
    CHUNK: channels summed separately before they are added to the total; 0 for a single sum.
    """
    await_inputs()
    shape: tl.constexpr = TileShape(DUAL, NORMED, BM, BN, BK)
    down, across = tl.cdiv(tokens, BM), tl.cdiv(out_channels, BN)
    y_picture = tl.cast(tokens, tl.int64) * out_channels
    inputs = Matrix(x, tokens, channels, x_picture, x_row)
    output = Matrix(y, tokens, out_channels, y_picture, out_channels)
    affine = Affine(scale_ptr, bias_ptr)
    added = Matrix(residual, tokens, out_channels, y_picture, out_channels)
    for tile in tl.range(tl.program_id(0), pictures * down * across, tl.num_programs(0), flatten=True):
        row_tile, column_tile = _place(tile, pictures * down, across, GROUP_M)
        place = Place(row_tile // down, row_tile % down * BM, column_tile * BN)

        zeros = tl.zeros((BM, BN), tl.float32)
        squares = tl.zeros((BM, BK), tl.float32) if NORMED else 0.0
        sums = Sums(zeros, zeros if DUAL else 0.0, squares)
        if CHUNK > 0:
            for start in range(0, channels, CHUNK):
                fresh = Sums(zeros, zeros if DUAL else 0.0, sums.squares)
                chunk = _add_products(
                    fresh, inputs, weight, out_channels, place, start, tl.minimum(start + CHUNK, channels), shape
                )
                sums = Sums(sums.acc + chunk.acc, sums.acc2 + chunk.acc2, chunk.squares)
        else:
            sums = _add_products(sums, inputs, weight, out_channels, place, 0, channels, shape)

        acc, acc2 = sums.acc, sums.acc2
        if x_scale_ptr is not None:
            row = place.row + tl.arange(0, BM)
            scales = x_scale_ptr + place.picture.to(tl.int64) * tokens + row
            scale = tl.load(scales, mask=row < tokens, other=0.0)[:, None]
            acc *= scale
            acc2 *= scale
        if NORMED:
            scale = tl.rsqrt(tree_sum(sums.squares, BM, BK, 1) / channels + eps)
            acc *= scale
            acc2 *= scale
        gates = gate_ptr if gate_ptr is None else gate_ptr + place.picture.to(tl.int64) * gate_stride
        _finish(output, acc, acc2, affine, gates, added, place, ACTIVATION, ACTIVATION2, DUAL, BM, BN, BY)
