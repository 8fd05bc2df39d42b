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
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

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


def ceilings() -> dict[str, float]:
    """What this GPU reaches: bf16 matrix products in TFLOP/s, copies in TB/s (read and written)."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = measure({"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)})
    return {
        "matmul_bf16_tflops": 2 * 8192**3 / times["matmul"] / 1e9,
        "copy_tbps": 2 * source.numel() / times["copy"] / 1e9,
    }


def report(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table and as JSON, each with the machine; save them where the command line asks for it."""
    widths = {key: max(len(key), *(len(_cell(row.get(key))) for row in rows)) for row in rows for key in row}
    print("  ".join(key.rjust(width) for key, width in widths.items()))
    for row in rows:
        print("  ".join(_cell(row.get(key)).rjust(width) for key, width in widths.items()))
    document = json.dumps([row | machine() for row in rows])
    folder = _arguments().save
    if folder is not None:
        Path(folder, f"{name}.json").write_text(document + "\n")
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", nargs="?", const=str(RESULTS), metavar="DIR", help="write the results as JSON")
    return parser.parse_known_args()[0]
