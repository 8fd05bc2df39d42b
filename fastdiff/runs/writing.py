"""Writing beside the drawing: pictures are encoded and written in threads, in which errors wait to be asked for."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from fastdiff.runs.drawing import Finished, Progress

T = TypeVar("T")
WAITING = 256 * 2**20  # bytes of the pictures that may wait


class Writer:
    """Threads that write what they are given, first come, first served; leaving its block waits for all of it.

    One thread alone keeps the order. More of them hardly encode faster, as PIL lets one at a time, but sync many files.
    """

    def __init__(self, threads: int = 1) -> None:
        self._waiting, self._room = 0, threading.Condition()  # bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="write")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for all that it was given."""
        self._pool.shutdown()

    def submit(self, write: Callable[[Finished], T], batch: Sequence[Finished]) -> list[Future[T]]:
        """Have `write` called for each picture of a batch. What it raises is raised by the result.

        Waits while too much waits. A batch is taken whole, since its pictures are there whether they wait or not.
        """
        if not batch:
            return []
        sizes = [_size(finished) for finished in batch]
        with self._room:
            self._room.wait_for(lambda: not self._waiting or self._waiting + sum(sizes) <= WAITING)
            self._waiting += sum(sizes)
        futures = [self._pool.submit(write, finished) for finished in batch]
        for future, size in zip(futures, sizes, strict=True):
            future.add_done_callback(lambda _, size=size: self._make_room(size))  # type: ignore[misc]
        return futures

    def _make_room(self, size: int) -> None:
        with self._room:
            self._waiting -= size
            self._room.notify_all()


def _size(finished: Finished) -> int:
    """The bytes of a picture: Pillow keeps a pixel in 4."""
    return 4 * finished.image.width * finished.image.height


def write_beside(
    steps: Iterator[Progress], write: Callable[[Finished], T], *, wait: bool = False
) -> Iterator[tuple[Progress, list[T]]]:
    """Have `write` called for the finished pictures of a run, in order, beside the drawing of the next ones.

    Yields after each step, with what `write` has returned by then, and after the last one again until all is there.

    wait: for the pictures of each batch before the next one begins. On a CPU nothing is gained beside the drawing, and
    whoever waits for pictures would see them a step later, which may take long there.

    Whatever ends the run, what is finished is written. Raises what drawing raises, or `write`.
    """
    waiting: deque[Future[T]] = deque()

    def written() -> list[T]:
        """All before the first error, which is raised once it is first in line."""
        results: list[T] = []
        while waiting and (wait or waiting[0].done()) and not (results and waiting[0].exception()):
            results.append(waiting.popleft().result())
        return results

    def rest() -> Iterator[tuple[Progress, list[T]]]:
        while waiting:
            yield replace(progress, finished=()), [waiting.popleft().result()]

    with Writer() as writer:
        try:
            for progress in steps:
                waiting.extend(writer.submit(write, progress.finished))
                yield progress, written()
        except Exception:
            yield from rest()
            raise
        yield from rest()
