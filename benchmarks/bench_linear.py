"""Linear layers with their epilogues in bfloat16: ours, eager and compiled torch, each time beside its error.

    python benchmarks/bench_linear.py [--save [DIR]]

`kernel` is ours also where the operation leaves the shape to the library; `plain` is the library's product and bias
alone. `share` is the fraction of the rate of a large product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from harness import DEVICE, ceilings, compiled, kernel_row, measure, needs_gpu, report
from shapes import LINEARS

from fastdiff.kernels.linear import by_kernel, linear


def main() -> None:
    needs_gpu("torch's own function")
    torch.backends.cuda.matmul.allow_tf32 = False  # of the truth
    peak = ceilings()["matmul_bf16_tflops"]
    report("linear", (row(name, peak) for name in LINEARS))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    args, options = arguments(name)
    plain = compiled(linear.reference)
    calls = {
        "fastdiff": lambda: linear(*args, **options),
        "kernel": lambda: by_kernel(*args, **options),
        "eager": lambda: linear.reference(*args, **options),
        "compile": lambda: plain(*args, **options),
    }
    truth = linear.reference(*map(widened, args), **{key: widened(value) for key, value in options.items()})
    flop = 2 * truth.numel() * args[0].shape[-1]
    plain_ms = measure({"plain": lambda: F.linear(*args)}, seconds=0.03)["plain"]
    return kernel_row(name, calls, truth, flop=flop, ceiling=peak_tflops) | {"plain_ms": plain_ms}


def arguments(name: str) -> tuple[tuple, dict[str, Any]]:
    """linear's for a workload: outputs of about unit size."""
    n, tokens, channels, out_channels, options = LINEARS[name]
    options = dict(options)
    if "gate" in options:
        options["gate"] = randn(n, 6 * out_channels)[:, :out_channels]
    if "residual" in options:
        options["residual"] = randn(n, tokens, out_channels)
    if "rms_norm" in options:
        options["rms_norm"] = (None, 1e-6)
    return (randn(n, tokens, channels), randn(out_channels, channels) * channels**-0.5, randn(out_channels)), options


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def widened(value: Any) -> Any:
    """In float32, where it is a tensor."""
    return value.float() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main()
