"""The Triton kernel of `rotary`: a program normalises and turns some heads of a token."""

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs


@triton.jit
def _weights(query_ptr, key_ptr, c, channel, is_query):
    """Load the norm's weight for each head, (heads, channels)."""
    query = tl.load(query_ptr + c, mask=channel, other=0.0).to(tl.float32)
    key = tl.load(key_ptr + c, mask=channel, other=0.0).to(tl.float32)
    return tl.where(is_query, query[None], key[None])


@triton.jit
def rotary_kernel(
    y_ptr, x_ptr, cos_ptr, sin_ptr, query_ptr, key_ptr, tokens, heads, queries, eps,
    x_picture, x_row, cos_picture, cos_row, sin_picture, sin_row,
    HALF: tl.constexpr, PAIR: tl.constexpr, APART: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise and turn up to BH heads of 2 HALF channels. Pair i is channels PAIR * i and PAIR * i + APART."""
    await_inputs()
    token = tl.program_id(0)
    picture, row = tl.cast(token // tokens, tl.int64), tl.cast(token % tokens, tl.int64)
    head, i = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BC)
    channel = i < HALF
    inside = (head < heads)[:, None] & channel[None]
    place = head[:, None] * (2 * HALF) + PAIR * i[None]
    x_ptr += picture * x_picture + row * x_row + place
    first = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + APART, mask=inside, other=0.0).to(tl.float32)
    if query_ptr is not None:
        width: tl.constexpr = float(2 * HALF)
        square = tl.div_rn(tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1), width)
        factor = tl.div_rn(1.0, tl.sqrt_rn(square + eps))[:, None]
        is_query = (head < queries)[:, None]
        first *= factor * _weights(query_ptr, key_ptr, PAIR * i, channel, is_query)
        second *= factor * _weights(query_ptr, key_ptr, PAIR * i + APART, channel, is_query)
    cos = tl.load(cos_ptr + picture * cos_picture + row * cos_row + i, mask=channel, other=0.0)[None]
    sin = tl.load(sin_ptr + picture * sin_picture + row * sin_row + i, mask=channel, other=0.0)[None]
    y_ptr += tl.cast(token, tl.int64) * heads * (2 * HALF) + place
    tl.store(y_ptr, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + APART, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=inside)
