"""GEGLU as one product in bfloat16: ours, eager and compiled torch; times and errors.

`kernel`, `hopper` and `plan` are as in bench_linear.

python benchmarks/kernels/bench_geglu.py [WORKLOAD ...] [--save [DIR]]
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.operations import ceilings, hopper_way, in_float32, kernel_row, randn, ways
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.shapes import GEGLUS
from fastdiff.kernels.geglu import geglu


def main() -> None:
    needs_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False  # the ground truth is float32
    peak = ceilings()["matmul_bf16_tflops"]
    report("geglu", (row(name, peak) for name in chosen(GEGLUS)))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    args = arguments(name)
    plan, hopper = hopper_way(geglu, *args)
    calls = ways(geglu, *args) | {"kernel": lambda: geglu.kernel(*args)} | hopper
    truth = in_float32(geglu.reference, args, {})
    row = kernel_row(name, calls, truth, flop=4 * truth.numel() * args[0].shape[-1], ceiling=peak_tflops)
    return row | {"plan": plan}


def arguments(name: str) -> tuple[Tensor, Tensor]:
    """Return the arguments of geglu for a workload."""
    n, tokens, channels, out_channels = GEGLUS[name]
    return randn(n, tokens, channels), randn(2 * out_channels, channels) * channels**-0.5


if __name__ == "__main__":
    main()
