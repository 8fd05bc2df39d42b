"""The model's input for a step: ours, its torch reference eager and compiled.

    python benchmarks/kernels/bench_scale_input.py [--save [DIR]]

The input is bfloat16, once for an unguided batch and twice for a guided one. `tbps` counts x_t and the result once;
`share` is its fraction of the rate of a large copy.
"""

from typing import Any

import torch

from benchmarks.harness.operations import ceilings, ways
from benchmarks.harness.reports import needs_gpu, report
from benchmarks.shapes import DENOISES
from fastdiff.kernels.denoise import COLUMNS
from fastdiff.kernels.scale_input import scale_input
from fastdiff.tuning.timing import DEVICE, measure

COPIES = {"plain": 1, "guided": 2}


def main() -> None:
    needs_gpu()
    copy = ceilings()["copy_tbps"]
    report("scale_input", (row(workload, kind, copy) for workload in DENOISES for kind in COPIES))


@torch.inference_mode()
def row(workload: str, kind: str, copy_tbps: float) -> dict[str, Any]:
    n, height = DENOISES[workload]
    x_t = torch.randn(n, height, height, 3, device=DEVICE)
    rows, step = torch.full((50, len(COLUMNS)), 1.7, device=DEVICE), torch.zeros(n, dtype=torch.int32, device=DEVICE)
    calls = ways(scale_input, x_t, rows, step, torch.bfloat16, COPIES[kind])
    made, expected = (call() for call in (calls["fastdiff"], calls["eager"]))
    if not torch.equal(made, expected):
        raise ArithmeticError(f"{workload}, {kind}: the bits differ from the reference's")
    times = measure(calls, seconds=0.03)
    tbps = (x_t.nbytes + made.nbytes) / times["fastdiff"] / 1e9
    return {
        "workload": f"{workload}-{kind}",
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "tbps": tbps,
        "share": tbps / copy_tbps,
    }


if __name__ == "__main__":
    main()
