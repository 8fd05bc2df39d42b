"""Conversion of int8 weights to bfloat16: ours, eager and compiled torch.

    python benchmarks/kernels/bench_from_int8.py [WORKLOAD ...] [--save [DIR]]

`tbps` counts the weight and the result once; `share` is its fraction of the rate of a large copy.
"""

from typing import Any

import torch

from benchmarks.harness.operations import ceilings, kernel_row, ways
from benchmarks.harness.reports import chosen, needs_gpu, report
from fastdiff.kernels.from_int8 import from_int8
from fastdiff.tuning.timing import DEVICE

WORKLOADS = {"C320": (320, 320), "C1152": (1152, 4608), "C1280": (1280, 10240), "C1280-3x3": (1280, 3, 3, 1280)}


def main() -> None:
    needs_gpu()
    copy = ceilings()["copy_tbps"]
    report("from_int8", (row(name, copy) for name in chosen(WORKLOADS)))


@torch.inference_mode()
def row(name: str, copy_tbps: float) -> dict[str, Any]:
    values = torch.randint(-127, 128, WORKLOADS[name], dtype=torch.int8, device=DEVICE)
    calls = ways(from_int8, values, torch.bfloat16)
    return kernel_row(name, calls, values.float(), moved=3 * values.nbytes, ceiling=copy_tbps)


if __name__ == "__main__":
    main()
