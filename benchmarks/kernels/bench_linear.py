"""Linear layers with their epilogues in bfloat16: ours, eager and compiled torch; times and errors.

    python benchmarks/kernels/bench_linear.py [WORKLOAD ...] [--save [DIR]]

`kernel` is the generic kernel and `hopper` the sm_90 kernel, whichever of them the operation itself chooses; `plan` is
the sm_90 kernel's name in `plans/choices.py`. `library` is torch's product with fused tanh GELU, and `plain` is torch's
product with a bias only. `share` is the fraction of the rate of a large product.
"""

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness.base import compare_if_asked
from benchmarks.harness.operations import ceilings, hopper_way, in_float32, kernel_row, randn, ways
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.shapes import LINEARS
from fastdiff.kernels.linear import linear
from fastdiff.tuning.timing import measure


def main() -> None:
    needs_gpu()
    compare_if_asked("benchmarks.kernels.bench_linear", LINEARS)
    torch.backends.cuda.matmul.allow_tf32 = False  # the ground truth is float32
    peak = ceilings()["matmul_bf16_tflops"]
    report("linear", (row(name, peak) for name in chosen(LINEARS)))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    args, options = arguments(name)
    truth = in_float32(linear.reference, args, options)
    plan, hopper = hopper_way(linear, *args, **options)
    calls = ways(linear, *args, **options) | {"kernel": lambda: linear.kernel(*args, **options)} | hopper
    if options.get("activation") == "gelu_tanh" and not {"gate", "residual"} & options.keys():
        x, weight, bias = args
        rows = x.flatten(0, 1)
        calls["library"] = lambda: torch._addmm_activation(bias, rows, weight.T, use_gelu=True).view_as(truth)
    flop = 2 * truth.numel() * args[0].shape[-1]
    plain_ms = measure({"plain": lambda: F.linear(*args)}, seconds=0.03)["plain"]
    return kernel_row(name, calls, truth, flop=flop, ceiling=peak_tflops) | {"plain_ms": plain_ms, "plan": plan}


def arguments(name: str) -> tuple[tuple, dict[str, Any]]:
    """Return linear's arguments for a workload, with outputs of about unit size."""
    n, tokens, channels, out_channels, options = LINEARS[name]
    options = dict(options)
    if "gate" in options:
        options["gate"] = randn(n, 6 * out_channels)[:, :out_channels]
    if "residual" in options:
        options["residual"] = randn(n, tokens, out_channels)
    if "rms_norm" in options:
        options["rms_norm"] = (None, 1e-6)
    return (randn(n, tokens, channels), randn(out_channels, channels) * channels**-0.5, randn(out_channels)), options


if __name__ == "__main__":
    main()
