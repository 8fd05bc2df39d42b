"""Writing beside the drawing: pictures are encoded and written in threads, in which errors wait to be asked for."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from fastdiff.runs.drawing import Finished, Progress

P = ParamSpec("P")
T = TypeVar("T")
WAITING = 1024  # pictures that may wait: two of the largest batches


class Writer:
    """Threads that write what they are given, first come, first served; leaving its block waits for all of it.

    One thread alone keeps the order. More of them hardly encode faster, as PIL lets one at a time, but sync many files.
    """

    def __init__(self, threads: int = 1) -> None:
        self._room = threading.BoundedSemaphore(WAITING)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="write")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for all that it was given."""
        self._pool.shutdown()

    def submit(self, write: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
        """Have `write` called; waits while too many wait. What it raises is raised by the result."""
        self._room.acquire()
        future = self._pool.submit(write, *args, **options)
        future.add_done_callback(lambda _: self._room.release())
        return future


def write_beside(
    steps: Iterator[Progress], write: Callable[[Finished], T], *, wait: bool = False
) -> Iterator[tuple[Progress, list[T]]]:
    """Have `write` called for the finished pictures of a run, in order, beside the drawing of the next ones.

    Yields after each step, with what `write` has returned by then, and after the last one until all is there.

    wait: for the pictures of each batch before the next one begins. On a CPU nothing is gained beside the drawing, and
    whoever waits for pictures would see them a step later, which may take long there.

    Whatever ends the run, what is finished is written. Raises what drawing raises, or `write`.
    """
    waiting: deque[Future[T]] = deque()

    def rest() -> Iterator[tuple[Progress, list[T]]]:
        while waiting:
            yield progress, [waiting.popleft().result()]

    with Writer() as writer:
        try:
            for progress in steps:
                waiting.extend(writer.submit(write, finished) for finished in progress.finished)
                yield progress, [waiting.popleft().result() for _ in range(len(waiting)) if wait or waiting[0].done()]
        except Exception:
            yield from rest()
            raise
        yield from rest()
