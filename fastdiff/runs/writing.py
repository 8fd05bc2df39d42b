"""Encode and write pictures in threads while drawing goes on. Their errors are raised where results are read."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from fastdiff.runs.drawing import Finished, Progress

T = TypeVar("T")
WAITING = 256 * 2**20  # bytes of pictures that may be queued


class Writer:
    """Threads that write pictures, first come, first served. Leaving the block waits for all writes.

    Only a single thread keeps the order. More threads encode small pictures side by side, and sync several at once.
    """

    def __init__(self, threads: int = 1) -> None:
        self._waiting, self._room = 0, threading.Condition()  # bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="write")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for all writes."""
        self._pool.shutdown()

    def submit(self, write: Callable[[Finished], T], batch: Sequence[Finished]) -> list[Future[T]]:
        """Call `write` in a thread for each picture of a batch. Its errors are raised by the futures.

        Blocks while the queue is full. A batch is queued as a whole, since its pictures are in memory anyway.
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
    """Return the bytes of a picture in memory: Pillow uses 4 per pixel."""
    return 4 * finished.image.width * finished.image.height


def write_beside(
    steps: Iterator[Progress], write: Callable[[Finished], T], *, wait: bool = False
) -> Iterator[tuple[Progress, list[T]]]:
    """Call `write` in a thread for the finished pictures of a run, in order, while the next ones are drawn.

    Yields after each step, with the results of `write` so far, and after the last step until all results are there.
    Finished pictures are written however the run ends. Raises the errors of drawing and of `write`.

    wait: write the pictures of each batch before the next batch begins. On a CPU, writing in parallel gains nothing,
    and pictures would appear a step later, which may take long there.
    """
    waiting: deque[Future[T]] = deque()

    def written() -> list[T]:
        """Return the results up to the first error. The error is raised once no result precedes it."""
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
