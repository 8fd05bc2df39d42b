"""3x3 convolutions with 8-bit weights: the sm_90 kernel ("hopper"), the generic kernel ("kernel"), and bf16.

    python benchmarks/kernels/quantised/bench_conv2d_8bit.py [workload ...] [--save [DIR]]

All convolutions add a time embedding and write moments. An fp8 convolution starts with `to_fp8`, which is also timed
alone; an int8 convolution starts with `from_int8`. `gain` is the generic kernel's time over the sm_90 kernel's, and
`over_bf16` is the bf16 time over the sm_90 kernel's. `share` is the sm_90 kernel's fraction, without to_fp8, of the
rate of a large bf16 product, or of twice that rate in fp8. At the end, prints the plans whose sm_90 kernel was faster
at every size and batch that ran, in the format of `plans/choices.py`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.harness.operations import ceilings, max_abs_err, print_confirmed, randn
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.kernels.bench_conv2d import hopper_arguments
from benchmarks.shapes import CONVOLUTIONS_8BIT
from fastdiff.kernels.conv2d import Conv2dCall, conv2d
from fastdiff.kernels.host.weights import FP8, INT8, quantise
from fastdiff.kernels.to_fp8 import to_fp8
from fastdiff.tuning.forwards import in_dtype
from fastdiff.tuning.timing import measure


def main() -> None:
    needs_gpu()
    gains: dict[str, list[float]] = {}
    report("conv2d_8bit", rows(chosen(CONVOLUTIONS_8BIT), gains))
    print_confirmed(gains)


def rows(names: list[str], gains: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of these workloads, and add each plan's gains to `gains`."""
    peak = ceilings()["matmul_bf16_tflops"]
    for name in names:
        made = row(name, peak)
        gains.setdefault(made["plan"], []).append(made["gain"])
        yield made


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    (x, weight, bias), options = in_bf16(name)
    dtype = dtype_of(name)
    args = x, quantise(weight, dtype), bias
    call = Conv2dCall(*args, **options)
    calls = {
        "hopper": partial(conv2d.hopper, *args, **options, moments=True),
        "kernel": partial(conv2d.kernel, *args, **options, moments=True),
        "bf16": partial(conv2d, x, weight, bias, **options, moments=True),
    }
    if dtype == FP8:
        calls["to_fp8"] = partial(to_fp8, x)
    wide_x, wide_bias, wide = in_dtype((x, bias, options), torch.float32)
    truth = conv2d.reference(wide_x, args[1], wide_bias, **wide)
    errors = {who: max_abs_err(calls[who](), truth) for who in ("hopper", "kernel")}
    if not errors["hopper"] <= 2 * errors["kernel"] + torch.finfo(torch.bfloat16).eps:
        raise ArithmeticError(f"{name}: hopper is off by {errors['hopper']:.3g}, kernel by {errors['kernel']:.3g}")
    times = measure(calls, seconds=0.01)
    alone, peak = times["hopper"] - times.get("to_fp8", 0), peak_tflops * (2 if dtype == FP8 else 1)
    return {
        "workload": name,
        "plan": call.hopper_plan(),
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "gain": times["kernel"] / times["hopper"],
        "over_bf16": times["bf16"] / times["hopper"],
        "share": 2 * truth.numel() * args[1].values[0].numel() / alone / 1e9 / peak,
        **{f"{who}_max_abs_err": error for who, error in errors.items()},
    }


def arguments(name: str) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of conv2d for a workload, with a weight in 8 bits."""
    (x, weight, bias), options = in_bf16(name)
    return (x, quantise(weight, dtype_of(name)), bias), options


def in_bf16(name: str) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of conv2d for a workload, with a time embedding and a weight in bfloat16."""
    args, options = hopper_arguments(name, CONVOLUTIONS_8BIT)
    return args, options | {"temb": randn(CONVOLUTIONS_8BIT[name][0], len(args[2]))}


def dtype_of(name: str) -> torch.dtype:
    return FP8 if name.startswith("fp8") else INT8


if __name__ == "__main__":
    main()
