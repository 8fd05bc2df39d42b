"""Compare an operation with torch: its implementations, its row of results, and the rates that a GPU reaches."""

import functools
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastdiff.kernels.device
from fastdiff.kernels.host.launching import is_sm_90
from fastdiff.kernels.host.recording import record
from fastdiff.kernels.plans.choices import hopper_obstacle
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.tuning.forwards import in_dtype
from fastdiff.tuning.timing import DEVICE, Call, measure


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def in_float32(function: Callable, args: tuple, options: dict[str, Any]) -> Any:
    """Call `function` with the arguments in float32, and return the ground truth."""
    return function(*in_dtype(args, torch.float32), **in_dtype(options, torch.float32))


def compiled(function: Callable) -> Callable:
    """Return `function` under torch.compile, with static shapes and without a fallback to eager torch."""
    torch.compiler.reset()  # dynamo falls back to eager at eight versions of one function
    return torch.compile(function, dynamic=False, fullgraph=True)


def ways(operation: Operation, *args: Any, **options: Any) -> dict[str, Call]:
    """Return calls of an operation: ours, and its torch reference eager and compiled."""
    runs: dict[str, Callable] = {
        "fastdiff": operation,
        "eager": operation.reference,
        "compile": compiled(operation.reference),
    }
    return {who: partial(run, *args, **options) for who, run in runs.items()}


def hopper_way(operation: Operation, *args: Any, **options: Any) -> tuple[str, dict[str, Call]]:
    """Return the name of the sm_90 kernel's plan, and a call of that kernel if it can run here."""
    call = operation.parse(*args, **options)
    runs = is_sm_90(DEVICE) and hopper_obstacle(call) is None
    return call.hopper_plan() or "", {"hopper": partial(operation.hopper, *args, **options)} if runs else {}


def print_confirmed(gains: Mapping[str, list[float]]) -> None:
    """Print which plans were faster wherever they ran, in the format of `plans/choices.py`, and which were not."""
    for plan, each in gains.items():
        if min(each) > 1:
            print(f'faster: "{plan}",')
        else:
            print(f"not confirmed: {plan}, gains {', '.join(f'{gain:.3g}' for gain in each)}")


def kernel_row(
    workload: str, calls: Mapping[str, Call], truth: Tensor, *, ceiling: float, flop: float = 0, moved: float = 0
) -> dict[str, Any]:
    """Return the row of an operation: times, errors, launches and memory of `calls`, one of which is "fastdiff".

    Args:
        calls: each returns an output (N, ...), or a tuple that begins with it.
        truth: (n, ...), float32 or wider; the first n pictures of the output.
        ceiling: TFLOP/s if the work is `flop` operations, TB/s if it is `moved` bytes.

    Raises:
        ArithmeticError: our error is more than twice eager torch's plus one bfloat16 eps; a wrong result is not timed.
    """
    errors = {f"{who}_max_abs_err": max_abs_err(call(), truth) for who, call in calls.items()}
    ours, torchs = errors.pop("fastdiff_max_abs_err"), errors["eager_max_abs_err"]
    if not ours <= 2 * torchs + torch.finfo(torch.bfloat16).eps:
        raise ArithmeticError(f"{workload}: ours is off by {ours:.3g}, eager torch by {torchs:.3g}")
    times = measure(calls, seconds=0.03)
    floor, rate = (flop or moved) / ceiling / 1e9, "tflops" if flop else "tbps"
    return {
        "workload": workload,
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "floor_ms": floor,
        rate: (flop or moved) / times["fastdiff"] / 1e9,
        f"ceiling_{rate}": ceiling,
        "share": floor / times["fastdiff"],
        "max_abs_err": ours,
        **errors,
        "launches": launches(calls["fastdiff"]),
        "peak_bytes": peak_bytes(calls["fastdiff"]),
    }


def max_abs_err(output: Any, truth: Tensor) -> float:
    output = output[0] if isinstance(output, tuple) else output
    return (output[: len(truth)].to(truth.dtype) - truth).abs().max().item()


def launches(call: Call) -> int:
    """Count our kernels and torch's operations in a call."""
    with record(DEVICE) as recorded:
        call()
    return sum(len(made.kernels) + len(made.torch) for made in recorded.calls)


def peak_bytes(call: Call) -> int:
    """Return the peak of the bytes that a call allocates outside of any CUDA graph, its output included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@functools.cache
def kernel_modules() -> dict[str, str]:
    """Map the name of each function that Triton compiles (the kernel's name) to the stem of its file."""
    found: dict[str, str] = {}
    root = Path(next(iter(fastdiff.kernels.device.__path__)))
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        module = importlib.import_module(f"fastdiff.kernels.device.{name}")
        for value in vars(module).values():
            function: Any = getattr(value, "fn", None)
            if getattr(function, "__module__", "") == module.__name__:  # not imported from another module
                found[function.__name__] = path.stem
    return found


def ceilings() -> dict[str, float]:
    """Measure the rates of this GPU: bf16 matrix products in TFLOP/s, copies in TB/s (reads plus writes)."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(2**29, device=DEVICE)
    target = torch.empty_like(source)
    # a kernel copies here: the copy node of a CUDA graph was measured to be slower
    times = measure({"matmul": lambda: a @ b, "copy": lambda: torch.neg(source, out=target)})
    return {
        "matmul_bf16_tflops": 2 * 8192**3 / times["matmul"] / 1e9,
        "copy_tbps": 2 * source.nbytes / times["copy"] / 1e9,
    }
