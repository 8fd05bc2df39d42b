"""The Triton kernel of `rotary`: a program normalises and turns some queries or some keys of a token."""

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs


@triton.jit
def _load_pairs(rows, inside, HALF: tl.constexpr, HALVES: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr):
    """Load the first and the second channel of each pair, (BH, BC) each, as float32. rows: (BH, 1), of each head.

    Adjacent channels are loaded side by side and separated in registers; alone, each would be a load of two bytes.
    """
    if HALVES:
        i = tl.arange(0, BC)[None]
        first = tl.load(rows + i, mask=inside & (i < HALF), other=0.0)
        second = tl.load(rows + HALF + i, mask=inside & (i < HALF), other=0.0)
    else:
        c = tl.arange(0, 2 * BC)[None]
        both = tl.load(rows + c, mask=inside & (c < 2 * HALF), other=0.0)
        first, second = both.reshape(BH, BC, 2).split()
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_pairs(
    rows, first, second, inside, HALF: tl.constexpr, HALVES: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr
):
    """Store what `_load_pairs` loads."""
    first, second = first.to(rows.dtype.element_ty), second.to(rows.dtype.element_ty)
    if HALVES:
        i = tl.arange(0, BC)[None]
        tl.store(rows + i, first, mask=inside & (i < HALF))
        tl.store(rows + HALF + i, second, mask=inside & (i < HALF))
    else:
        c = tl.arange(0, 2 * BC)[None]
        tl.store(rows + c, tl.join(first, second).reshape(BH, 2 * BC), mask=inside & (c < 2 * HALF))


@triton.jit
def rotary_kernel(
    y_ptr, x_ptr, cos_ptr, sin_ptr, query_ptr, key_ptr, tokens, heads, queries, eps,
    x_picture, x_row, cos_picture, cos_row, sin_picture, sin_row,
    HALF: tl.constexpr, HALVES: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise and turn up to BH heads of 2 HALF channels, all queries or all keys.

    Pair i is channels i and HALF + i if HALVES, else 2 i and 2 i + 1.
    """
    await_inputs()
    token, block, blocks = tl.program_id(0), tl.program_id(1), tl.cdiv(queries, BH)  # of queries; then come keys
    picture, row = tl.cast(token // tokens, tl.int64), tl.cast(token % tokens, tl.int64)
    is_query = block < blocks
    head = tl.where(is_query, block * BH, queries + (block - blocks) * BH) + tl.arange(0, BH)[:, None]
    inside, place = head < tl.where(is_query, queries, heads), head * (2 * HALF)
    x_ptr += picture * x_picture + row * x_row
    first, second = _load_pairs(x_ptr + place, inside, HALF, HALVES, BH, BC)
    i = tl.arange(0, BC)[None]
    cos = tl.load(cos_ptr + picture * cos_picture + row * cos_row + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + picture * sin_picture + row * sin_row + i, mask=i < HALF, other=0.0)
    if query_ptr is not None:
        # every thread loads its own few weights: loads by pairs would be exchanged through shared memory
        weights = tl.where(is_query, query_ptr, key_ptr) + (i if HALVES else 2 * i)
        weight = tl.load(weights, mask=i < HALF, other=0.0).to(tl.float32)
        weight2 = tl.load(weights + (HALF if HALVES else 1), mask=i < HALF, other=0.0).to(tl.float32)
        share: tl.constexpr = 1 / (2 * HALF)
        factor = tl.rsqrt(tl.sum(first * first + second * second, axis=1) * share + eps)[:, None]
        first *= factor * weight
        second *= factor * weight2
    y_ptr += tl.cast(token, tl.int64) * heads * (2 * HALF)
    turned, turned2 = first * cos - second * sin, second * cos + first * sin
    _store_pairs(y_ptr + place, turned, turned2, inside, HALF, HALVES, BH, BC)
