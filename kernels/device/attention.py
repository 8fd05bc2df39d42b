"""The Triton kernel of `attention`: FlashAttention (Dao 2023, arXiv 2307.08691), head width in one or two parts."""

from typing import Any, NamedTuple

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import LOG2_E, await_inputs


class Walk(NamedTuple):
    """The state of a block of queries in the loop over keys: running sums and pointers."""

    acc: Any  # (BM, D1) the output so far, first part of the head width
    acc2: Any  # (BM, D2) second part
    top: Any  # (BM,) the running maximum of the scores
    total: Any  # (BM,) the running sum of exponentials
    k_ptrs: Any
    v_ptrs: Any


class Width(NamedTuple):
    """Constants: the head width, and the two parts into which products split it."""

    D: Any
    D1: Any
    D2: Any


@triton.jit
def _load_rows(ptr, rows, first, D: tl.constexpr, WIDTH: tl.constexpr, limit, MASKED: tl.constexpr):
    """Load columns first to first + WIDTH of some rows; 0 from column D on and, if MASKED, from row `limit` on."""
    mask = None
    if MASKED:
        mask = (rows < limit)[:, None]
    if first + WIDTH > D:
        inside = (first + tl.arange(0, WIDTH) < D)[None, :]
        mask = inside if mask is None else mask & inside
    return tl.load(ptr + first + tl.arange(0, WIDTH)[None, :], mask=mask, other=None if mask is None else 0.0)


@triton.jit
def _store_rows(ptrs, acc, total, residual_ptrs, inside, first, D: tl.constexpr, WIDTH: tl.constexpr):
    """Store acc / total, plus the residual if any, as columns first to first + WIDTH of the rows that are `inside`."""
    columns = first + tl.arange(0, WIDTH)[None, :]
    mask = inside & (columns < D)
    y = acc / total[:, None]
    if residual_ptrs is not None:
        y += tl.load(residual_ptrs + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptrs + columns, y.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _accumulate(acc, a, b):
    """Return acc + a b. In float32 the product is summed separately first, because shorter sums round less."""
    if a.dtype == tl.float32:
        # acc - acc is a zero that the compiler cannot fold; otherwise it would accumulate into acc
        return acc + tl.dot(a, b, acc - acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _attend(
    walk, q, q2, rows, start, stop, keys, bias_ptr, k_row, v_row, scale,
    CAUSAL: tl.constexpr, width: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Advance the walk over keys start to stop."""
    acc, acc2, top, total, k_ptrs, v_ptrs = walk.acc, walk.acc2, walk.top, walk.total, walk.k_ptrs, walk.v_ptrs
    for first in range(start, stop, BN):
        columns = first + tl.arange(0, BN)
        k = _load_rows(k_ptrs, columns, 0, width.D, width.D1, keys, MASKED)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if width.D2 > 0:
            k2 = _load_rows(k_ptrs, columns, width.D1, width.D, width.D2, keys, MASKED)
            scores = _accumulate(scores, q2, k2.T)
        if bias_ptr is not None:
            biases = tl.load(bias_ptr + columns, mask=columns < keys, other=0.0).to(tl.float32)
            scores += (biases * (LOG2_E / scale))[None, :]
        if MASKED:
            visible = (columns < keys)[None, :]
            if CAUSAL:
                visible = visible & (columns[None, :] <= rows[:, None])
            scores = tl.where(visible, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        p = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        top = new_top
        v = _load_rows(v_ptrs, columns, 0, width.D, width.D1, keys, MASKED)
        p = p.to(v.dtype)
        acc = _accumulate(acc * shrink[:, None], p, v)
        if width.D2 > 0:
            v2 = _load_rows(v_ptrs, columns, width.D1, width.D, width.D2, keys, MASKED)
            acc2 = _accumulate(acc2 * shrink[:, None], p, v2)
        k_ptrs += BN * k_row
        v_ptrs += BN * v_row
    return Walk(acc, acc2, top, total, k_ptrs, v_ptrs)


@triton.jit
def attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, residual_ptr, lengths_ptr, heads, group, queries, keys, scale,
    q_picture, q_row, k_picture, k_row, v_picture, v_row,
    CAUSAL: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend BM queries of one head. D is the head width; products split it into two parts, D1 + D2 >= D.

    group: heads of queries for each head of keys. lengths_ptr: how many keys of each picture are read; None for all.
    """
    await_inputs()
    blocks = tl.cdiv(queries, BM)
    pid = tl.program_id(0)
    rows = pid % blocks * BM + tl.arange(0, BM)
    head, n = pid // blocks % heads, (pid // blocks // heads).to(tl.int64)
    q_ptrs = q_ptr + n * q_picture + head * D + rows.to(tl.int64)[:, None] * q_row
    key_head = head // group
    k_ptrs = k_ptr + n * k_picture + key_head * D + tl.arange(0, BN)[:, None] * k_row
    v_ptrs = v_ptr + n * v_picture + key_head * D + tl.arange(0, BN)[:, None] * v_row

    q = _load_rows(q_ptrs, rows, 0, D, D1, queries, True)
    acc = tl.zeros((BM, D1), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    q2, acc2 = q, total  # placeholders, unused if the width is not split
    if D2 > 0:
        q2 = _load_rows(q_ptrs, rows, D1, D, D2, queries, True)
        acc2 = tl.zeros((BM, D2), tl.float32)

    length = keys if lengths_ptr is None else tl.minimum(keys, tl.load(lengths_ptr + n))
    seen, clear = length, length // BN * BN  # keys before `clear` need no mask for any of these queries
    if CAUSAL:
        seen = tl.minimum(length, (pid % blocks + 1) * BM)
        clear = tl.minimum(clear, pid % blocks * BM // BN * BN)
    bias_ptrs = bias_ptr if bias_ptr is None else bias_ptr + n * keys
    width: tl.constexpr = Width(D, D1, D2)
    walk = Walk(acc, acc2, top, total, k_ptrs, v_ptrs)
    walk = _attend(walk, q, q2, rows, 0, clear, length, bias_ptrs, k_row, v_row, scale, CAUSAL, width, BN, False)
    walk = _attend(walk, q, q2, rows, clear, seen, length, bias_ptrs, k_row, v_row, scale, CAUSAL, width, BN, True)

    out_ptrs = out_ptr + (n * queries + rows)[:, None] * (heads * D) + head * D
    residual_ptrs = residual_ptr
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + (n * queries + rows)[:, None] * (heads * D) + head * D
    inside = (rows < queries)[:, None]
    _store_rows(out_ptrs, walk.acc, walk.total, residual_ptrs, inside, 0, D, D1)
    if D2 > 0:
        _store_rows(out_ptrs, walk.acc2, walk.total, residual_ptrs, inside, D1, D, D2)
