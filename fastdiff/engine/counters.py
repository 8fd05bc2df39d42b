"""Count what an engine does, for a page of metrics."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Stats(NamedTuple):
    """The state of an engine, and what it has done since it began."""

    queued: int  # requests that have not begun
    oldest_seconds: float  # how long the oldest of them has waited
    active: int  # requests that have begun and not ended
    steps: int  # steps taken, each by one request or several
    pictures: int  # the rows of these steps that were pictures
    rows: int  # all rows of these steps, with the ones that fill a graph
    step_seconds: float  # of these steps, on a GPU as the GPU measures it
    decodes: int  # batches of latents that were decoded


class Counters:
    """Counts steps. One thread counts, any thread reads."""

    def __init__(self) -> None:
        self.steps = self.pictures = self.rows = self.decodes = 0
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # steps that the GPU may still run

    def count(self, pictures: int, rows: int, steps: int) -> None:
        """Count steps of so many pictures."""
        self.steps += steps
        self.pictures += pictures * steps
        self.rows += rows * steps

    @contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        """Add the time of the block's steps, without a wait for the GPU."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        stream = torch.cuda.current_stream(device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        yield
        end.record(stream)
        self._pending.append((begin, end))
        self._read()

    def _read(self) -> None:
        """Add the times of the steps that the GPU has ended."""
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3

    def stats(self, queued: int, oldest_seconds: float, active: int) -> Stats:
        """Return the numbers."""
        return Stats(queued, oldest_seconds, active, self.steps, self.pictures, self.rows, self._seconds, self.decodes)
