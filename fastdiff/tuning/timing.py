"""The time of calls on one device, measured in turns. The benchmarks measure by the same functions."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

GROUPS = 5  # a time is the median of so many groups of calls
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Call = Callable[[], Any]


def measure(calls: Mapping[str, Call], *, graph: bool = True, seconds: float = 0.1) -> dict[str, float]:
    """Return the milliseconds of each call, warm. Groups of `seconds` take turns, so all calls meet the same machine.

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
    """Return a replay of the kernels that `call`, which has run before, launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds_each(call: Call, count: int) -> float:
    """Return the seconds of one of `count` calls in a row."""
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
