"""Attention in bfloat16 for growing numbers of tokens: naive, ours and torch's SDPA; times and memory.

    python benchmarks/kernels/bench_attention_lengths.py [--save [DIR]]

One picture, 8 heads of width 64. "naive" materialises the scores of all pairs of tokens, if they fit in memory. `bytes`
is the peak that a call allocates, its output included. `plots.py` makes a table and a plot of the results.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.operations import max_abs_err, peak_bytes, randn
from benchmarks.harness.reports import needs_gpu, report
from benchmarks.kernels.bench_attention import exact
from benchmarks.shapes import ATTENTION_LENGTHS
from fastdiff.kernels.attention import attention
from fastdiff.tuning.timing import measure

HEADS, WIDTH = 8, 64


def main() -> None:
    needs_gpu()
    report("attention_lengths", map(row, ATTENTION_LENGTHS))


@torch.inference_mode()
def row(tokens: int) -> dict[str, Any]:
    """Return a row: milliseconds, bytes and error of each implementation, or None if it does not fit in memory."""
    qkv = randn(1, tokens, 3 * HEADS * WIDTH).chunk(3, dim=-1)
    truth = exact(qkv, heads=HEADS)
    ways = {"naive": naive, "fastdiff": attention, "torch": attention.reference}
    measured = {who: measured_way(partial(way, *qkv, heads=HEADS), truth) for who, way in ways.items()}
    ours, torchs = (measured[who]["max_abs_err"] for who in ("fastdiff", "torch"))
    if not ours <= 2 * torchs + torch.finfo(torch.bfloat16).eps:
        raise ArithmeticError(f"{tokens} tokens: ours is off by {ours:.3g}, torch's by {torchs:.3g}")
    flat = {f"{who}_{name}": value for who, numbers in measured.items() for name, value in numbers.items()}
    return {"workload": f"L{tokens}", "tokens": tokens} | flat


def measured_way(call: Callable[[], Tensor], truth: Tensor) -> dict[str, float | None]:
    try:
        return {
            "ms": measure({"way": call}, seconds=0.03)["way"],
            "bytes": peak_bytes(call),
            "max_abs_err": max_abs_err(call(), truth),
        }
    except torch.OutOfMemoryError:
        return dict.fromkeys(("ms", "bytes", "max_abs_err"))


def naive(q: Tensor, k: Tensor, v: Tensor, *, heads: int) -> Tensor:
    """Compute attention literally by its formula, with all scores in memory."""
    q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5  # (N, heads, L, L)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


if __name__ == "__main__":
    main()
