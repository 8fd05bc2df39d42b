"""Measure the time of calls on one device, in turns. The benchmarks use the same functions."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

GROUPS = 5  # a time is the median of this many groups of calls
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Call = Callable[[], Any]


def measure(
    calls: Mapping[str, Call],
    *,
    graph: bool = True,
    seconds: float = 0.1,
    count: int | None = None,
    device: torch.device | None = None,
    tell: Callable[[dict[str, float]], None] | None = None,
) -> dict[str, float]:
    """Return the milliseconds of each call, after a warm-up.

    Groups of calls, each about `seconds` long, take turns, so changes of the machine affect all calls alike. On a GPU
    the time is that of a CUDA graph replay. Without `graph` it is that of plain calls, with their launches.

    Args:
        count: the number of calls in each group, instead of `seconds`.
        device: where the calls run (default: DEVICE).
        tell: receives the result so far after each round of groups.
    """
    device = device or DEVICE
    for call in calls.values():
        for _ in range(3):
            call()
    if device.type == "cuda":
        torch.cuda.synchronize()
        calls = {name: capture(call) for name, call in calls.items()} if graph else calls
    counts = {name: count or max(1, round(seconds / seconds_each(call, 1, device))) for name, call in calls.items()}
    groups: list[dict[str, float]] = []
    for _ in range(GROUPS):
        groups.append({name: seconds_each(call, counts[name], device) for name, call in calls.items()})
        if tell is not None:
            tell(_medians(groups))
    return _medians(groups)


def _medians(groups: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median milliseconds of each call."""
    return {name: 1e3 * statistics.median(group[name] for group in groups) for name in groups[0]}


def capture(call: Call) -> Call:
    """Capture the kernels that `call` launches, and return their replay. `call` must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds_each(call: Call, count: int, device: torch.device | None = None) -> float:
    """Return the seconds per call of `count` calls in a row on `device` (default: DEVICE)."""
    if (device or DEVICE).type == "cpu":
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
