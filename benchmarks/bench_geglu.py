"""GEGLU as one product in bfloat16: ours, eager and compiled torch, each time beside its error.

python benchmarks/bench_geglu.py [--save [DIR]]
"""

from typing import Any

import torch
from harness import ceilings, in_float32, kernel_row, needs_gpu, randn, report, ways
from shapes import GEGLUS

from fastdiff.kernels.geglu import geglu


def main() -> None:
    needs_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False  # of the truth
    peak = ceilings()["matmul_bf16_tflops"]
    report("geglu", (row(name, peak) for name in GEGLUS))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    n, tokens, channels, out_channels = GEGLUS[name]
    args = randn(n, tokens, channels), randn(2 * out_channels, channels) * channels**-0.5
    truth = in_float32(geglu.reference, args, {})
    return kernel_row(name, ways(geglu, *args), truth, flop=4 * truth.numel() * channels, ceiling=peak_tflops)


if __name__ == "__main__":
    main()
