"""SwiGLU as one product in bfloat16: ours, eager and compiled torch; times and errors.

`kernel`, `hopper` and `plan` are as in bench_linear.

python benchmarks/kernels/bench_swiglu.py [WORKLOAD ...] [--save [DIR]]
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.operations import ceilings, hopper_way, in_float32, kernel_row, randn, ways
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.shapes import SWIGLUS
from fastdiff.kernels.swiglu import swiglu


def main() -> None:
    needs_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False  # the ground truth is float32
    peak = ceilings()["matmul_bf16_tflops"]
    report("swiglu", (row(name, peak) for name in chosen(SWIGLUS)))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    args = arguments(name)
    plan, hopper = hopper_way(swiglu, *args)
    calls = ways(swiglu, *args) | {"kernel": lambda: swiglu.kernel(*args)} | hopper
    truth = in_float32(swiglu.reference, args, {})
    row = kernel_row(name, calls, truth, flop=4 * truth.numel() * args[0].shape[-1], ceiling=peak_tflops)
    return row | {"plan": plan}


def arguments(name: str) -> tuple[Tensor, Tensor]:
    """Return the arguments of swiglu for a workload."""
    n, tokens, channels, out_channels = SWIGLUS[name]
    return randn(n, tokens, channels), randn(2 * out_channels, channels) * channels**-0.5


if __name__ == "__main__":
    main()
