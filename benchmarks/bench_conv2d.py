"""Convolution with its epilogue and the moments for the next norm: ours, eager and compiled, on channels-last bfloat16.

    python benchmarks/bench_conv2d.py [--save [DIR]]

Ours writes moments too; eager and compiled torch (cuDNN, with its benchmark on) do not. A planner's block is a
convolution of one dimension with GroupNorm and Mish in it, in torch channels-first. `share` is the fraction of the rate
of a large matrix product.
"""

from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from base import compare_if_asked
from harness import ceilings, compiled, in_float32, kernel_row, needs_gpu, randn, report, ways
from shapes import CONV1D_BLOCKS, CONVOLUTIONS
from torch import Tensor

from fastdiff.kernels.conv2d import Norm, conv2d

GROUPS, TAPS = 8, 5  # of a planner's block


def main() -> None:
    needs_gpu()
    compare_if_asked("bench_conv2d", CONVOLUTIONS)
    torch.backends.cudnn.benchmark = True
    peak = ceilings()["matmul_bf16_tflops"]
    blocks = (block_row(name, peak) for name in CONV1D_BLOCKS)
    report("conv2d", chain((row(name, peak) for name in CONVOLUTIONS), blocks))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    args, options = arguments(name)
    calls = ways(conv2d, *args, **options) | {"fastdiff": lambda: conv2d(*args, **options, moments=True)}
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        truth = in_float32(conv2d.reference, args, options)
    flop = 2 * truth.numel() * args[1][0].numel()
    return kernel_row(name, calls, truth, flop=flop, ceiling=peak_tflops)


@torch.inference_mode()
def block_row(name: str, peak_tflops: float) -> dict[str, Any]:
    """A planner's block, launched once by ours."""
    n, length, channels, out_channels = CONV1D_BLOCKS[name]
    x = randn(n, channels, length)
    weight, bias = randn(out_channels, channels, TAPS) * (channels * TAPS) ** -0.5, randn(out_channels)
    scale, shift = randn(out_channels), randn(out_channels)
    rows = x.permute(0, 2, 1)[:, None].contiguous()  # (N, 1, L, C)
    filters = weight[:, :, None].contiguous(memory_format=torch.channels_last)
    norm = Norm(GROUPS, scale, shift, activation="mish")
    fused = compiled(block)
    calls = {
        "fastdiff": lambda: conv2d(rows, filters, bias, padding=(2, 2, 0, 0), norm=norm)[:, 0].permute(0, 2, 1),
        "eager": lambda: block(x, weight, bias, scale, shift),
        "compile": lambda: fused(x, weight, bias, scale, shift),
    }
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        truth = in_float32(block, (x, weight, bias, scale, shift), {})
    return kernel_row(name, calls, truth, flop=2 * truth.numel() * weight[0].numel(), ceiling=peak_tflops)


def block(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x (N, C, L) through diffusers' Conv1dBlock."""
    return F.mish(F.group_norm(F.conv1d(x, weight, bias, padding=TAPS // 2), GROUPS, scale, shift))


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
