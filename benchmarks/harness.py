"""What the benchmarks share: timing, the ceilings of a GPU, and reports.

`python benchmarks/bench_<x>.py` prints a table for people and, as the last line, one JSON document, which `--save` also
writes to benchmarks/results/<x>.json (`--save DIR`: there).
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.kernels.host.dispatch import Operation
from fastdiff.kernels.host.recording import record

RESULTS = Path(__file__).parent / "results"
GROUPS = 5  # a time is the median of so many groups of calls
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Call = Callable[[], Any]


def measure(calls: dict[str, Call], *, graph: bool = True, seconds: float = 0.1) -> dict[str, float]:
    """Milliseconds of each call, warm, in groups of about `seconds` that take turns, so that all meet the same machine.

    On a GPU it is the time of a CUDA graph's replay; without `graph`, of calls as they are, launches included.
    """
    for call in calls.values():
        for _ in range(3):
            call()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        calls = {name: capture(call) for name, call in calls.items()} if graph else calls
    counts = {name: max(1, round(seconds / _seconds(call, 1))) for name, call in calls.items()}
    groups = [{name: _seconds(call, counts[name]) for name, call in calls.items()} for _ in range(GROUPS)]
    return {name: 1e3 * statistics.median(group[name] for group in groups) for name in calls}


def capture(call: Call) -> Call:
    """A replay of the kernels that `call`, which has run before, launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _seconds(call: Call, count: int) -> float:
    """Of one of `count` calls in a row."""
    if DEVICE.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def widened(value: Any) -> Any:
    """In float32, where it is a tensor or a pair of them."""
    if isinstance(value, tuple) and isinstance(value[0], Tensor):
        return tuple(part.float() for part in value)
    return value.float() if isinstance(value, Tensor) else value


def in_float32(function: Callable, args: tuple, options: dict[str, Any]) -> Any:
    """`function` of the arguments in float32: the truth."""
    return function(*map(widened, args), **{key: widened(value) for key, value in options.items()})


def compiled(function: Callable) -> Callable:
    """`function` under torch.compile for the shapes that it is called with, without a fallback to eager torch."""
    torch.compiler.reset()  # dynamo gives up on a function of which it keeps eight versions
    return torch.compile(function, dynamic=False, fullgraph=True)


def ways(operation: Operation, *args, **options) -> dict[str, Call]:
    """Calls of an operation: ours, and its torch reference eager and compiled."""
    runs = {"fastdiff": operation, "eager": operation.reference, "compile": compiled(operation.reference)}
    return {who: partial(run, *args, **options) for who, run in runs.items()}


def kernel_row(
    workload: str, calls: dict[str, Call], truth: Tensor, *, ceiling: float, flop: float = 0, moved: float = 0
) -> dict[str, Any]:
    """What is said of an operation: times, errors, launches and memory of `calls`, of which one is "fastdiff".

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
    floor = (flop or moved) / ceiling / 1e9
    return {
        "workload": workload,
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "floor_ms": floor,
        "tflops" if flop else "tbps": (flop or moved) / times["fastdiff"] / 1e9,
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
    """Kernels of ours, and operations of torch, in a call."""
    with record(DEVICE) as recorded:
        call()
    return sum(len(made.kernels) + len(made.torch) for made in recorded.calls)


def peak_bytes(call: Call) -> int | None:
    """Allocated by a call beyond what was there, its output included."""
    if DEVICE.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def ceilings() -> dict[str, float]:
    """What this GPU reaches: bf16 matrix products in TFLOP/s, copies in TB/s (read and written)."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(2**29, device=DEVICE)
    target = torch.empty_like(source)
    # copied by a kernel: the copy node of a CUDA graph was seen to be slower
    times = measure({"matmul": lambda: a @ b, "copy": lambda: torch.neg(source, out=target)})
    return {
        "matmul_bf16_tflops": 2 * 8192**3 / times["matmul"] / 1e9,
        "copy_tbps": 2 * source.nbytes / times["copy"] / 1e9,
    }


def needs_gpu(elsewhere: str) -> None:
    """Ends a benchmark where there is no GPU; `elsewhere` says what its operation is there."""
    if DEVICE.type != "cuda":
        print(f"this benchmark needs a GPU: elsewhere the operation is {elsewhere}")
        raise SystemExit


def report(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print the rows as a table and as JSON, each with the machine; save them where the command line asks for it.

    They are saved one by one: what was measured is kept, whatever becomes of the rest.
    """
    done, folder = [], save_folder()
    for row in rows:
        done.append(row)
        document = json.dumps([each | machine() for each in done])
        if folder is not None:
            Path(folder, f"{name}.json").write_text(document + "\n")
    widths = {key: max(len(key), *(len(_cell(row.get(key))) for row in done)) for row in done for key in row}
    print("  ".join(key.rjust(width) for key, width in widths.items()))
    for row in done:
        print("  ".join(_cell(row.get(key)).rjust(width) for key, width in widths.items()))
    print(document)


def machine() -> dict[str, str]:
    """What a number depends on besides the code, and the commit of the code."""
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


def save_folder() -> str | None:
    """Where the command line asks for the results, if it does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", nargs="?", const=str(RESULTS), metavar="DIR", help="write the results to a file")
    return parser.parse_known_args()[0].save
