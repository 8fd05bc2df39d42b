"""Draw the runs of requests: steps in the engine, files in threads. The event loop of the server waits for neither."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.engine import Engine, Weights
from fastdiff.hosting.applying import weights_key
from fastdiff.hosting.budget import Budget
from fastdiff.pipelines import Pipeline
from fastdiff.requests.defaults import BATCH_ON_CPU
from fastdiff.requests.request import Request
from fastdiff.runs import drawing
from fastdiff.runs.drawing import Finished, Progress, Records
from fastdiff.serve.metrics import Metrics
from fastdiff.serve.offers import Offers
from fastdiff.serve.orders.encoding import Encoded, encode, encode_preview
from fastdiff.serve.orders.translation import Order

if TYPE_CHECKING:
    from PIL.Image import Image

ENCODERS = 2  # threads


@dataclass(frozen=True)
class Made:
    """A picture on its way to a client."""

    place: int  # of the `n` pictures
    partial: int | None  # the number of a partial picture, from 0; None: it is finished
    picture: Encoded
    seed: int
    record: Mapping[str, Any]  # the settings; empty for a partial picture


class Job:
    """The pictures of an order, in order. Belongs to an event loop; the engine and the encoders add to it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._loop = asyncio.get_running_loop()
        self._coming: asyncio.Queue[Future[Made] | None] = asyncio.Queue()
        self._ended: Future[None] = Future()

    def follow(self, future: "Future[None]") -> None:
        """Take the future of the drawing: its end ends the job, and cancelling the job cancels it."""
        self._ended = future
        future.add_done_callback(lambda _: self._tell(None))

    def add(self, made: "Future[Made]") -> None:
        """Add a picture that is being encoded. Called in any thread."""
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


class Drawer:
    """Draws orders with the models on offer."""

    def __init__(self, offers: Offers, engine: Engine, metrics: Metrics, minutes: float | None = None) -> None:
        """minutes: that drawing a request may take; None for no limit."""
        self.offers, self.engine, self.metrics, self.budget = offers, engine, metrics, Budget(minutes)
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")

    def begin(self, job: Job) -> None:
        """Queue the drawing of a job. Not for the event loop: it may read files.

        Raises InputError for a LoRA that is gone, and for a run that would take too long.
        """
        run, models = job.order.run, self.offers.models
        self.budget.check(run)
        models.catalogue.option_files.check(run.request)
        pipe = models.pipeline(run.card, run.request.scheduler, run.request.precision)
        records = Records(run, pipe)
        records.wait()  # here, so that no step of other requests waits
        looks = bool(job.order.partial) or self.budget.minutes is not None
        draw = partial(self._draw, job, pipe, records)
        job.follow(self.engine.call(pipe, draw, weights=self._weights(pipe, run.request), each_step=looks))

    def warm_up(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Draw two steps of each model at its own size, and capture the CUDA graphs of others (width, height)."""
        for card in self.offers.cards:
            pipe = self.offers.models.pipeline(card, None, self.offers.precision)
            weights = self._weights(pipe, Request(model=card.name))
            self.engine.call(pipe, partial(pipe, prompt="", num_inference_steps=2), weights=weights).result()
            if sizes:  # a CPU has no graphs, and draws each picture alone
                most = BATCH_ON_CPU if self.offers.on_cpu else None
                self.engine.warm(pipe, [(height, width) for width, height in sizes], max_batch=most)

    def _weights(self, pipe: Pipeline, request: Request) -> Weights:
        return Weights(weights_key(request), partial(self.offers.models.apply, pipe, request))

    def close(self) -> None:
        """Wait for the encoders."""
        self._encoders.shutdown()

    def _draw(self, job: Job, pipe: Pipeline, records: Records) -> None:
        """Draw in the engine's thread. All requests wait while this does anything but a step."""
        order = job.order
        self.metrics.begun(job)
        for progress in self.budget.watch(drawing.draw(order.run, pipe, records)):
            self.metrics.finished(progress)
            partial = partial_steps(order.partial, progress.step.num_steps)
            if progress.step.index + 1 in partial:
                self._preview(job, progress, partial.index(progress.step.index + 1))
            for finished in progress.finished:
                job.add(self._encoders.submit(self._made, order, finished))

    def _preview(self, job: Job, progress: Progress, number: int) -> None:
        order = job.order
        for place, image in zip(progress.places, progress.step.preview(), strict=True):
            job.add(self._encoders.submit(_partial, order, place, number, image))

    def _made(self, order: Order, finished: Finished) -> Made:
        record = self._named(finished.record)
        return Made(finished.place, None, encode(finished.image, order.form, record), finished.cell.seed, record)

    def _named(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a picture with the names of files, without the server's folders."""
        named = self.offers.models.catalogue.record_with_names(record)
        return named | {name: Path(named[name]).name for name in ("init_image", "mask") if name in named}


def partial_steps(count: int, steps: int) -> list[int]:
    """Return the numbers of the steps, from 1, after which `count` partial pictures come.

    The first comes after two steps, and the others are spread evenly over the rest. A short run has fewer.
    """
    return sorted({min(2 + i * max(steps - 2, 0) // count, steps - 1) for i in range(count)} - {0})


def _partial(order: Order, place: int, number: int, image: "Image") -> Made:
    return Made(place, number, encode_preview(image, order.size, order.form), order.run.cells[place].seed, {})
