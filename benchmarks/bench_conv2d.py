"""Convolution with its epilogue and the moments for the next norm: ours, eager and compiled, on channels-last bfloat16.

    python benchmarks/bench_conv2d.py [--save [DIR]]

Ours writes moments too; eager and compiled torch (cuDNN, with its benchmark on) do not. `share` is the fraction of the
rate of a large matrix product.
"""

from typing import Any

import torch
from harness import ceilings, in_float32, kernel_row, needs_gpu, randn, report, ways
from shapes import CONVOLUTIONS

from fastdiff.kernels.conv2d import conv2d


def main() -> None:
    needs_gpu()
    torch.backends.cudnn.benchmark = True
    peak = ceilings()["matmul_bf16_tflops"]
    report("conv2d", (row(name, peak) for name in CONVOLUTIONS))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    args, options = arguments(name)
    calls = ways(conv2d, *args, **options) | {"fastdiff": lambda: conv2d(*args, **options, moments=True)}
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        truth = in_float32(conv2d.reference, args, options)
    flop = 2 * truth.numel() * args[1][0].numel()
    return kernel_row(name, calls, truth, flop=flop, ceiling=peak_tflops)


def arguments(name: str) -> tuple[tuple, dict[str, Any]]:
    """conv2d's for a workload: outputs of about unit size."""
    n, height, channels, out_channels, kernel, options = CONVOLUTIONS[name]
    options = {"padding": kernel // 2, **options}
    parts = tuple(randn(n, height, height, width) for width in channels)
    taps = sum(channels) * kernel**2
    weight = (randn(out_channels, sum(channels), kernel, kernel) * taps**-0.5).contiguous(
        memory_format=torch.channels_last
    )
    if "temb" in options:
        options["temb"] = randn(n, out_channels)
    if "residual" in options:
        options["residual"] = randn(n, height, height, out_channels)
    return (parts if len(parts) == 2 else parts[0], weight, randn(out_channels)), options


if __name__ == "__main__":
    main()
