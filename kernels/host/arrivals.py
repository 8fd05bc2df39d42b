"""Counters for kernels in which the last program of a tile adds the parts of all its programs.

A launch gets zeros and leaves zeros, so launches that run one after the other share their counters. Launches that may
run at the same time do not: each stream has its own counters, and so has each CUDA graph captured `with_counters`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

MOST = 4096  # counters of a stream or graph: more than the programs of any launch that needs them

_of_graph: ContextVar[Tensor | None] = ContextVar("_of_graph", default=None)
_of_stream: dict[tuple[torch.device, int], Tensor] = {}


@contextmanager
def with_counters(zeros: Tensor) -> Iterator[None]:
    """Let the launches of a capture use these counters, of `new_counters`, as long as the graph lives."""
    token = _of_graph.set(zeros)
    try:
        yield
    finally:
        _of_graph.reset(token)


def new_counters(device: torch.device) -> Tensor:
    return torch.zeros(MOST, dtype=torch.int32, device=device)


def counters(count: int, device: torch.device) -> Tensor:
    """Return at least `count` zeros for a launch on the current stream, which leaves zeros."""
    zeros = _of_graph.get()
    if zeros is not None and zeros.device == device and count <= MOST:
        return zeros
    if device.type != "cuda" or count > MOST or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = device, torch.cuda.current_stream(device).cuda_stream
    if stream not in _of_stream:
        _of_stream[stream] = new_counters(device)
    return _of_stream[stream]


def parts_memory(tiles: int, parts: int, numbers: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for the parts of all tiles, (tiles, parts, numbers) float32, and a counter for each tile."""
    return torch.empty(tiles, parts, numbers, dtype=torch.float32, device=device), counters(tiles, device)
