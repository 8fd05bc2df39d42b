"""The Triton kernel of `attention` for few keys: all keys and values stay on chip while programs loop over queries."""

from typing import Any, NamedTuple

from fastdiff.kernels.device.language import cuda, target_info, tl, triton
from fastdiff.kernels.device.math import LOG2_E

# Run-time arguments not worth a kernel variant.
SIZES = ("heads", "queries", "keys", "chunks", "length")


class Head(NamedTuple):
    """The rows of one head of one picture, in memory."""

    ptr: Any  # to its first row
    row_stride: Any
    rows: Any


@triton.jit
def _head(ptr, n, head, picture_stride, row_stride, rows, D: tl.constexpr):
    return Head(ptr + n.to(tl.int64) * picture_stride + head * D, row_stride, rows)


@triton.jit
def _offsets(head, row, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets of ROWS rows from `row` on and COLUMNS >= D columns, and their mask."""
    r, c = row + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (r < head.rows)[:, None]
    if COLUMNS > D:
        inside = inside & (c < D)[None, :]
    return r[:, None] * head.row_stride + c[None, :], inside


@triton.jit
def _load(head, row, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows of a head; 0 where masked."""
    offsets, inside = _offsets(head, row, D, ROWS, COLUMNS)
    return tl.load(head.ptr + offsets, mask=inside, other=0.0)


@triton.jit
def _scores(
    q, k, bias_ptr, rows, first, keys, scale,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return q k^T + bias / scale for KEYS keys from `first` on; -inf for masked keys."""
    columns = first + tl.arange(0, KEYS)
    scores = tl.dot(q, k.T, input_precision="ieee")
    if bias_ptr is not None:
        biases = tl.load(bias_ptr + columns, mask=columns < keys, other=0.0).to(tl.float32)
        scores += (biases * (LOG2_E / scale))[None, :]
    if not WHOLE:
        scores = tl.where((columns < keys)[None, :], scores, -float("inf"))
    if CAUSAL:
        scores = tl.where(columns[None, :] <= rows[:, None], scores, -float("inf"))
    return scores


@triton.jit(do_not_specialize=SIZES)
def few_keys_attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, heads, queries, keys, scale, chunks, length,
    q_picture, q_row, k_picture, k_row, v_picture, v_row,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend `length` tiles of BM queries of one head, one after another; `chunks` programs share a head's tiles.

    All keys are loaded in two parts, B1 + B2 >= keys (WHOLE: equal). WIDTH >= D is the number of columns of a product.
    """
    if target_info.cuda_capability_geq(9, 0):
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    chunk, pair = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    head, n = pair % heads, pair // heads
    q_head = _head(q_ptr, n, head, q_picture, q_row, queries, D)
    k_head = _head(k_ptr, n, head, k_picture, k_row, keys, D)
    v_head = _head(v_ptr, n, head, v_picture, v_row, keys, D)
    out_head = _head(out_ptr, n, head, queries * heads * D, heads * D, queries, D)
    bias_ptrs = bias_ptr if bias_ptr is None else bias_ptr + n * keys
    k, v = _load(k_head, 0, D, B1, WIDTH), _load(v_head, 0, D, B1, WIDTH)
    if B2 > 0:
        k2, v2 = _load(k_head, B1, D, B2, WIDTH), _load(v_head, B1, D, B2, WIDTH)
    first = chunk * length * BM
    for row in tl.range(first, tl.minimum(first + length * BM, queries), BM, num_stages=STAGES):
        rows = row + tl.arange(0, BM)
        q = _load(q_head, row, D, BM, WIDTH)
        scores = _scores(q, k, bias_ptrs, rows, 0, keys, scale, CAUSAL, WHOLE or B2 > 0, B1)
        top = tl.max(scores, 1)
        if B2 > 0:
            scores2 = _scores(q, k2, bias_ptrs, rows, B1, keys, scale, CAUSAL, WHOLE, B2)
            top = tl.maximum(top, tl.max(scores2, 1))
        top *= scale
        p = tl.exp2(scores * scale - top[:, None])
        total = tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        if B2 > 0:
            p2 = tl.exp2(scores2 * scale - top[:, None])
            total += tl.sum(p2, 1)
            acc = tl.dot(p2.to(v.dtype), v2, acc, input_precision="ieee")
        offsets, inside = _offsets(out_head, row, D, BM, WIDTH)
        tl.store(out_head.ptr + offsets, (acc * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
