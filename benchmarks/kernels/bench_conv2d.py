"""Convolution with its epilogue and the moments for the next norm, in channels-last bfloat16: ours, eager, compiled.

    python benchmarks/kernels/bench_conv2d.py [workload ...] [--save [DIR]]

Ours also writes moments; eager and compiled torch (cuDNN with benchmark on) do not. A planner's block is a
one-dimensional convolution fused with GroupNorm and Mish; torch runs it channels-first. `share` is the fraction of the
rate of a large matrix product.

The rows of HOPPER_CONVOLUTIONS compare the sm_90 kernel ("hopper") with the generic kernel ("kernel") and cuDNN
("eager"): without moments, with moments, and with moments and a residual. `gain` is the generic kernel's time over the
sm_90 kernel's, with moments; `plan` is the sm_90 kernel's name in `plans/choices.py`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.base import compare_if_asked
from benchmarks.harness.operations import ceilings, compiled, in_float32, kernel_row, max_abs_err, randn, ways
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.shapes import CONV1D_BLOCKS, CONVOLUTIONS, HOPPER_CONVOLUTIONS
from fastdiff.kernels.conv2d import Conv2dCall, Norm, Shortcut, conv2d
from fastdiff.kernels.plans import confirmation
from fastdiff.tuning.forwards import in_dtype
from fastdiff.tuning.timing import DEVICE, Call, measure

GROUPS, TAPS = 8, 5  # a planner's block


def main() -> None:
    needs_gpu()
    compare_if_asked("benchmarks.kernels.bench_conv2d", CONVOLUTIONS)
    torch.backends.cudnn.benchmark = True
    report("conv2d", rows(chosen((*CONVOLUTIONS, *CONV1D_BLOCKS, *HOPPER_CONVOLUTIONS))))


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    peak = ceilings()["matmul_bf16_tflops"]
    for name in names:
        if name in HOPPER_CONVOLUTIONS:
            if confirmation.gluon_obstacle(DEVICE) is None:
                yield hopper_row(name, peak)
        else:
            yield (row if name in CONVOLUTIONS else block_row)(name, peak)


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
    """Time a planner's block, which is a single launch for ours."""
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
    """Return x (N, C, L) after diffusers' Conv1dBlock."""
    return F.mish(F.group_norm(F.conv1d(x, weight, bias, padding=TAPS // 2), GROUPS, scale, shift))


@torch.inference_mode()
def hopper_row(name: str, peak_tflops: float) -> dict[str, Any]:
    args, options = hopper_arguments(name, HOPPER_CONVOLUTIONS)
    call, calls = Conv2dCall(*args, **options), hopper_calls(args, options)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        truth = conv2d.reference(*in_dtype(args, torch.float32), **in_dtype(options, torch.float32))
    errors = {who: max_abs_err(calls[who](), truth) for who in ("hopper", "kernel", "eager")}
    if not errors["hopper"] <= 2 * errors["eager"] + torch.finfo(torch.bfloat16).eps:
        raise ArithmeticError(f"{name}: hopper is off by {errors['hopper']:.3g}, eager by {errors['eager']:.3g}")
    filters = args[1][0].numel() + (call.shortcut.weight[0].numel() if call.shortcut else 0)
    times = measure(calls, seconds=0.01)
    return {
        "workload": name,
        "plan": call.hopper_plan(),
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "gain": times["kernel_moments"] / times["hopper_moments"],
        "share": 2 * truth.numel() * filters / times["hopper_moments"] / 1e9 / peak_tflops,
        **{f"{who}_max_abs_err": error for who, error in errors.items()},
    }


def hopper_calls(args: tuple, options: dict[str, Any]) -> dict[str, Call]:
    """Return calls without moments, with them, and with a residual too, unless the convolution has a shortcut."""
    residual = {"residual": randn(*Conv2dCall(*args, **options).problem.out_shape)}
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        "_moments": {"moments": True},
        "_residual": {"moments": True} | residual,
    }
    if "shortcut" in options:
        del kinds["_residual"]
    calls: dict[str, Call] = {
        f"{who}{kind}": partial(run, *args, **options, **more)
        for who, run in (("hopper", conv2d.hopper), ("kernel", conv2d.kernel))
        for kind, more in kinds.items()
    }
    calls["eager"] = partial(conv2d.reference, *args, **options)
    if "_residual" in kinds:
        calls["eager_residual"] = partial(conv2d.reference, *args, **options, **residual)
    return calls


def hopper_arguments(name: str, sizes: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return conv2d's arguments for a workload of a table like HOPPER_CONVOLUTIONS, with outputs of about unit size."""
    n, height, width, channels, out_channels, options = sizes[name]
    options = {"padding": 1, **options}
    parts = tuple(randn(n, height, width, c) for c in channels)
    weight = (randn(out_channels, sum(channels), 3, 3) * (9 * sum(channels)) ** -0.5).contiguous(
        memory_format=torch.channels_last
    )
    if "shortcut" in options:
        added, total = tuple(randn(n, height, width, c) for c in options["shortcut"]), sum(options["shortcut"])
        weight2 = randn(out_channels, total, 1, 1) * total**-0.5
        options["shortcut"] = Shortcut(added if len(added) > 1 else added[0], weight2, randn(out_channels))
    return (parts if len(parts) == 2 else parts[0], weight, randn(out_channels)), options


def arguments(name: str) -> tuple[tuple, dict[str, Any]]:
    """Return conv2d's arguments for a workload, with outputs of about unit size."""
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
