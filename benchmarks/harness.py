"""Timing, the ceilings of a GPU, and reports, for all benchmarks.

`python benchmarks/bench_<x>.py` prints each row when it has it, for people, and as the last line one JSON document,
which `--save` also writes to benchmarks/results/<x>.json (`--save DIR`: there).
"""

import argparse
import functools
import importlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastdiff.kernels.device
from fastdiff.kernels.host.launching import is_sm_90
from fastdiff.kernels.host.recording import record
from fastdiff.kernels.plans.choices import hopper_obstacle
from fastdiff.kernels.plans.dispatch import Operation

RESULTS = Path(__file__).parent / "results"
GROUPS = 5  # a time is the median of so many groups of calls
COLUMN, WORKLOAD = 11, 36  # characters of a printed number, and of a workload's name
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

PARSER = argparse.ArgumentParser()
PARSER.add_argument("workload", nargs="*", help="the ones to measure, where a benchmark lets one choose")
PARSER.add_argument("--save", nargs="?", const=str(RESULTS), metavar="DIR", help="write the results to a file")

Call = Callable[[], Any]


def environment() -> dict[str, str]:
    """The variables of processes that a benchmark starts: they find fastdiff as it is here."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def measure(calls: Mapping[str, Call], *, graph: bool = True, seconds: float = 0.1) -> dict[str, float]:
    """Milliseconds of each call, warm, in groups of about `seconds` that take turns, so that all meet the same machine.

    On a GPU it is the time of a CUDA graph's replay; without `graph`, of calls as they are, launches included.
    """
    for call in calls.values():
        for _ in range(3):
            call()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        calls = {name: capture(call) for name, call in calls.items()} if graph else calls
    counts = {name: max(1, round(seconds / seconds_each(call, 1))) for name, call in calls.items()}
    groups = [{name: seconds_each(call, counts[name]) for name, call in calls.items()} for _ in range(GROUPS)]
    return {name: 1e3 * statistics.median(group[name] for group in groups) for name in calls}


def capture(call: Call) -> Call:
    """A replay of the kernels that `call`, which has run before, launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds_each(call: Call, count: int) -> float:
    """The seconds of one of `count` calls in a row."""
    if DEVICE.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def widened(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The value with all its floats in a wider dtype, where it is a tensor or a tuple that holds some."""
    if isinstance(value, tuple):
        items = (widened(item, dtype) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def in_float32(function: Callable, args: tuple, options: dict[str, Any]) -> Any:
    """Return `function` of the arguments in float32: the truth."""
    return function(*widened(args), **{key: widened(value) for key, value in options.items()})


def compiled(function: Callable) -> Callable:
    """`function` under torch.compile for the shapes that it is called with, without a fallback to eager torch."""
    torch.compiler.reset()  # dynamo gives up on a function of which it keeps eight versions
    return torch.compile(function, dynamic=False, fullgraph=True)


def ways(operation: Operation, *args: Any, **options: Any) -> dict[str, Call]:
    """Calls of an operation: ours, and its torch reference eager and compiled."""
    runs: dict[str, Callable] = {
        "fastdiff": operation,
        "eager": operation.reference,
        "compile": compiled(operation.reference),
    }
    return {who: partial(run, *args, **options) for who, run in runs.items()}


def hopper_way(operation: Operation, *args: Any, **options: Any) -> tuple[str, dict[str, Call]]:
    """The name of the plan of a kernel made for sm_90 alone, and a call of it where it can run here."""
    call = operation.parse(*args, **options)
    runs = is_sm_90(DEVICE) and hopper_obstacle(call) is None
    return call.hopper_plan() or "", {"hopper": partial(operation.hopper, *args, **options)} if runs else {}


def print_confirmed(gains: Mapping[str, list[float]]) -> None:
    """Print which plans were faster wherever they ran, for a row of `plans/choices.py`, and which were not."""
    for plan, each in gains.items():
        if min(each) > 1:
            print(f"for the table: {plan}")
        else:
            print(f"not for the table: {plan}, gains {', '.join(f'{gain:.3g}' for gain in each)}")


def kernel_row(
    workload: str, calls: Mapping[str, Call], truth: Tensor, *, ceiling: float, flop: float = 0, moved: float = 0
) -> dict[str, Any]:
    """The row of an operation: times, errors, launches and memory of `calls`, of which one is "fastdiff".

    Args:
        calls: each returns its output, (N, ...), or a tuple that begins with it.
        truth: (n, ...), float32 or wider: the first n pictures.
        ceiling: TFLOP/s where the work is `flop` operations, TB/s where it is `moved` bytes.

    Raises: ArithmeticError where ours is off by more than twice what eager torch is: a wrong result has no time.
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
    """The number of our kernels and of torch's operations in a call."""
    with record(DEVICE) as recorded:
        call()
    return sum(len(made.kernels) + len(made.torch) for made in recorded.calls)


def peak_bytes(call: Call) -> int:
    """Bytes that a call, outside of any CUDA graph, allocates beyond what was there, its output included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@functools.cache
def kernel_modules() -> dict[str, str]:
    """The name of each function that Triton compiles, which is its kernel's, and the stem of the file it is in."""
    found: dict[str, str] = {}
    root = Path(next(iter(fastdiff.kernels.device.__path__)))
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        module = importlib.import_module(f"fastdiff.kernels.device.{name}")
        for value in vars(module).values():
            function: Any = getattr(value, "fn", None)
            if getattr(function, "__module__", "") == module.__name__:  # not imported from another
                found[function.__name__] = path.stem
    return found


def ceilings() -> dict[str, float]:
    """The rates that this GPU reaches: bf16 matrix products in TFLOP/s, copies in TB/s (read and written)."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(2**29, device=DEVICE)
    target = torch.empty_like(source)
    # copied by a kernel: the copy node of a CUDA graph was seen to be slower
    times = measure({"matmul": lambda: a @ b, "copy": lambda: torch.neg(source, out=target)})
    return {
        "matmul_bf16_tflops": 2 * 8192**3 / times["matmul"] / 1e9,
        "copy_tbps": 2 * source.nbytes / times["copy"] / 1e9,
    }


def needs_gpu() -> None:
    """End a benchmark of kernels where there is no GPU."""
    if DEVICE.type != "cuda":
        print("this benchmark needs a GPU: elsewhere every operation is its torch reference")
        raise SystemExit


def report(name: str, rows: Iterable[dict[str, Any]], *, by: tuple[str, ...] = ()) -> None:
    """Print each row when it is there, in the end all as JSON with their machine; save where the command line asks.

    Rows are saved one by one: what was measured is kept, whatever becomes of the rest.

    by: where there are such keys, a new row replaces the saved one that has the same values, and no other.
    """
    done: list[dict[str, Any]] = []
    columns: list[str] = []
    folder, where = save_folder(), machine()
    saved = read_rows(Path(folder, f"{name}.json")) if by and folder is not None else []
    for row in rows:
        new = [key for key in row if key not in columns]
        if new:
            columns += new
            print(_line({key: key for key in columns}, columns), flush=True)
        print(_line(row, columns), flush=True)
        done.append(row | where)
        if folder is not None:
            new_ones = {tuple(map(each.get, by)) for each in done}
            kept = [each for each in saved if tuple(map(each.get, by)) not in new_ones]
            Path(folder, f"{name}.json").write_text(json.dumps(kept + done) + "\n")
    print(json.dumps(done))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a saved report; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def _line(row: dict[str, Any], columns: list[str]) -> str:
    """The row's cells under the columns' names, blank where it has none."""
    widths = {key: WORKLOAD if key == "workload" else max(COLUMN, len(key)) for key in columns}
    return "  ".join(_cell(row.get(key)).rjust(width) for key, width in widths.items())


def machine() -> dict[str, str]:
    """Everything that a number depends on: GPU, versions, and the commit of the code."""
    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"none ({platform.machine()} CPU)"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS)
    versions = {name: _version(name) for name in ("torch", "triton", "diffusers")}
    return {"gpu": gpu, **versions, "commit": git.stdout.strip() or "unknown"}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def chosen(workloads: Iterable[str]) -> list[str]:
    """The workloads that the command line names, or all of them."""
    known = list(workloads)
    named = command_line().workload
    for name in named:
        if name not in known:
            raise SystemExit(f"no workload {name!r}; there are {', '.join(known)}")
    return named or known


def save_folder() -> str | None:
    """Where the command line asks for the results, if it does."""
    return command_line().save


def command_line() -> argparse.Namespace:
    """Return what the command line asks for: workloads, where to save, and what a benchmark added to PARSER."""
    return PARSER.parse_args()
