"""Convolution with its epilogue and the moments for the next norm: ours, eager and compiled, on channels-last bfloat16.

    python benchmarks/bench_conv2d.py [--save [DIR]]

Ours writes moments too; eager and compiled torch (cuDNN, with its benchmark on) do not. `share` is the fraction of the
rate of a large matrix product.
"""

from typing import Any

import torch
from harness import DEVICE, ceilings, compiled, kernel_row, needs_gpu, report
from shapes import CONVOLUTIONS

from fastdiff.kernels.conv2d import conv2d


def main() -> None:
    needs_gpu("torch's own convolution")
    torch.backends.cudnn.benchmark = True
    peak = ceilings()["matmul_bf16_tflops"]
    report("conv2d", (row(name, peak) for name in CONVOLUTIONS))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    args, options = arguments(name)
    plain = compiled(conv2d.reference)
    calls = {
        "fastdiff": lambda: conv2d(*args, **options, moments=True),
        "eager": lambda: conv2d.reference(*args, **options),
        "compile": lambda: plain(*args, **options),
    }
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        truth = conv2d.reference(*map(widened, args), **{key: widened(value) for key, value in options.items()})
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


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def widened(value: Any) -> Any:
    """In float32, where it is a tensor or a pair of them."""
    if isinstance(value, tuple) and isinstance(value[0], torch.Tensor):
        return tuple(part.float() for part in value)
    return value.float() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main()
