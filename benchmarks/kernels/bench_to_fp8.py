"""bfloat16 activations rounded to e4m3 with a factor per token or picture: ours, eager and compiled torch.

    python benchmarks/kernels/bench_to_fp8.py [--save [DIR]]

`tbps` counts x and the result once; `share` is its fraction of the rate of a large copy.
"""

from typing import Any

import torch

from benchmarks.harness.operations import ceilings, randn, ways
from benchmarks.harness.reports import needs_gpu, report
from benchmarks.shapes import TO_FP8
from fastdiff.kernels.to_fp8 import to_fp8
from fastdiff.tuning.timing import measure


def main() -> None:
    needs_gpu()
    copy = ceilings()["copy_tbps"]
    report("to_fp8", (row(name, copy) for name in TO_FP8))


@torch.inference_mode()
def row(name: str, copy_tbps: float) -> dict[str, Any]:
    x = randn(*TO_FP8[name])
    calls = ways(to_fp8, x)
    expected, made = (call()[0].values for call in (calls["eager"], calls["fastdiff"]))
    if not torch.equal(made.view(torch.uint8), expected.view(torch.uint8)):
        raise ArithmeticError(f"{name}: the bits differ from the reference's")
    times = measure(calls, seconds=0.03)
    tbps = 1.5 * x.nbytes / times["fastdiff"] / 1e9
    return {
        "workload": name,
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "tbps": tbps,
        "share": tbps / copy_tbps,
    }


if __name__ == "__main__":
    main()
