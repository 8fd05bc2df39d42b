"""Between HTTP and drawing: a drawer takes jobs, and gives each its pictures. HTTP knows nothing else of drawers."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastdiff.serve.orders.encoding import Encoded
from fastdiff.serve.orders.translation import Order


@dataclass(frozen=True)
class Made:
    """A picture on its way to a client."""

    place: int  # of the `n` pictures
    partial: int | None  # the number of a partial picture, from 0; None: it is finished
    picture: Encoded
    seed: int
    record: Mapping[str, Any]  # the settings; empty for a partial picture


class Job:
    """The pictures of an order, in order. Belongs to an event loop; a drawer adds to it in any thread."""

    def __init__(self, order: Order, when_begun: Callable[["Job"], object] = lambda job: None) -> None:
        """when_begun: called in any thread when drawing begins."""
        self.order = order
        self._when_begun = when_begun
        self._loop = asyncio.get_running_loop()
        self._coming: asyncio.Queue[Future[Made] | None] = asyncio.Queue()
        self._ended: Future[None] = Future()

    def follow(self, future: "Future[None]") -> None:
        """Take the future of the drawing: its end ends the job, and cancelling the job cancels it."""
        before, self._ended = self._ended, future
        future.add_done_callback(lambda _: self._tell(None))
        if before.cancelled():
            future.cancel()

    def begun(self) -> None:
        """Tell that drawing begins. It may begin again in another process."""
        self._when_begun(self)

    def add(self, made: "Future[Made]") -> None:
        """Add a picture that is being encoded."""
        self._tell(made)

    def cancel(self) -> None:
        """End the drawing before its next step."""
        self._ended.cancel()

    async def pictures(self) -> AsyncIterator[Made]:
        """Yield the pictures as they are made. Raises the error of the drawing or of the encoding."""
        while (coming := await self._coming.get()) is not None:
            yield await asyncio.wrap_future(coming)
        self._ended.result()

    def _tell(self, made: "Future[Made] | None") -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._coming.put_nowait, made)


@dataclass(frozen=True)
class Counts:
    """Counts of a drawer since it began, for the metrics."""

    steps: int = 0  # steps taken, each by one job or several
    pictures: int = 0  # the rows of these steps that were pictures
    rows: int = 0  # all rows of these steps
    step_seconds: float = 0.0  # of these steps
    decodes: int = 0  # batches of latents that were decoded
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes by their kind
    workers: int = 0  # worker processes that live
    restarts: int = 0  # worker processes that died and got a successor

    def plus(self, other: "Counts") -> "Counts":
        """Return the sum."""
        return Counts(
            steps=self.steps + other.steps,
            pictures=self.pictures + other.pictures,
            rows=self.rows + other.rows,
            step_seconds=self.step_seconds + other.step_seconds,
            decodes=self.decodes + other.decodes,
            memory=Counter(self.memory) + Counter(other.memory),
            workers=self.workers + other.workers,
            restarts=self.restarts + other.restarts,
        )


class Drawer(Protocol):
    """Draws jobs. Any thread may call the methods, but not the event loop: they may wait."""

    lost: "Future[BaseException]"  # gets the error after which nothing more is drawn

    def load(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Load the models, and draw a few steps at each of the `sizes` (width, height).

        Returns notices for the operator. Raises the error of loading.
        """

    def begin(self, job: Job) -> None:
        """Queue the drawing of a job. Raises InputError for what cannot be drawn."""

    def counts(self) -> Counts:
        """Return what was done until now."""

    def close(self, seconds: float) -> bool:
        """End all jobs before their next step. Return whether the current step ended within the time."""
