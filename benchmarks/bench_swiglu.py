"""SwiGLU as one product in bfloat16: ours, eager and compiled torch, each time beside its error.

python benchmarks/bench_swiglu.py [--save [DIR]]
"""

from typing import Any

import torch
from harness import ceilings, in_float32, kernel_row, needs_gpu, randn, report, ways
from shapes import SWIGLUS

from fastdiff.kernels.swiglu import swiglu


def main() -> None:
    needs_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False  # of the truth
    peak = ceilings()["matmul_bf16_tflops"]
    report("swiglu", (row(name, peak) for name in SWIGLUS))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    n, tokens, channels, out_channels = SWIGLUS[name]
    args = randn(n, tokens, channels), randn(2 * out_channels, channels) * channels**-0.5
    truth = in_float32(swiglu.reference, args, {})
    return kernel_row(name, ways(swiglu, *args), truth, flop=4 * truth.numel() * channels, ceiling=peak_tflops)


if __name__ == "__main__":
    main()
