"""Admission: how many requests are here at a time."""

import math
import time
from collections import Counter, deque

from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.wire.errors import ApiError

REMEMBERED = 32  # ended requests that the rate is measured with
LONGEST_WAIT = 600  # seconds: the largest Retry-After


class Place:
    """A request's place among those that are here. Leaving the block gives it back."""

    def __init__(self, admission: "Admission", key: object) -> None:
        self._admission, self._key, self._streams = admission, key, 0

    def __enter__(self) -> "Place":
        self._admission.here += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self._key, self._streams)

    def open_stream(self) -> None:
        """Count a stream of the request's key until the request ends. Raises ApiError 429 if it has too many."""
        self._admission.open_stream(self._key)
        self._streams += 1


class Admission:
    """The requests that are here: a bounded number. Used in the server's event loop alone."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.here = 0
        self.closed = False  # whether the server takes no more requests
        self._streams: Counter[object] = Counter()
        self._ended: deque[float] = deque(maxlen=REMEMBERED)

    def place(self, key: object) -> Place:
        """Return a place for a request of a key, to be entered at once.

        Raises ApiError 503 if the server stops, and 429 if the queue is full.
        """
        if self.closed:
            raise ApiError(503, "the server stops; send the request to another", code="stopping")
        if self.here >= self.limits.requests + self.limits.queue:
            raise self._too_many(f"the queue is full: {self.here} requests are here", "queue_full")
        return Place(self, key)

    def open_stream(self, key: object) -> None:
        """Count a stream. Raises ApiError 429."""
        if self._streams[key] >= self.limits.streams:
            raise self._too_many(f"{self.limits.streams} streams of this key are open", "too_many_streams")
        self._streams[key] += 1

    def leave(self, key: object, streams: int) -> None:
        """Give a place back."""
        self.here -= 1
        self._streams[key] -= streams
        if not self._streams[key]:
            del self._streams[key]
        self._ended.append(time.monotonic())

    def retry_after(self) -> int:
        """Return in how many seconds a place should be free: the measured time between two ends of requests."""
        if len(self._ended) < 2:
            return 1
        pace = (time.monotonic() - self._ended[0]) / (len(self._ended) - 1)
        return max(1, min(LONGEST_WAIT, math.ceil(pace)))

    def _too_many(self, problem: str, code: str) -> ApiError:
        seconds = self.retry_after()
        return ApiError(429, f"{problem}; try again in {seconds} s", code=code, headers={"Retry-After": str(seconds)})
