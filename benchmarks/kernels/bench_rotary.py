"""RMSNorm and rotary embedding of queries and keys in bfloat16: ours, eager and compiled torch.

    python benchmarks/kernels/bench_rotary.py [WORKLOAD ...] [--save [DIR]]

`tbps` counts queries and keys twice and the tables once; `share` is its fraction of the rate of a large copy.
"""

from typing import Any

import torch

from benchmarks.harness.operations import ceilings, in_float32, kernel_row, randn, ways
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.shapes import ROTARIES
from fastdiff.kernels.rotary import rotary


def main() -> None:
    needs_gpu()
    copy = ceilings()["copy_tbps"]
    report("rotary", (row(name, copy) for name in chosen(ROTARIES)))


@torch.inference_mode()
def row(name: str, copy_tbps: float) -> dict[str, Any]:
    n, tokens, queries, keys, width, halves = ROTARIES[name]
    x, norms = randn(n, tokens, (queries + 2 * keys) * width)[..., : (queries + keys) * width], randn(2, width)
    angles = randn(1, tokens, width // 2).float()
    given = (x, angles.cos(), angles.sin(), tuple(norms))
    options: dict[str, Any] = {"queries": queries, "eps": 1e-5, "halves": halves}
    truth = in_float32(rotary.reference, given, options)
    moved = 2 * x.numel() * x.itemsize + 2 * angles.nbytes
    return kernel_row(name, ways(rotary, *given, **options), truth, moved=moved, ceiling=copy_tbps)


if __name__ == "__main__":
    main()
