"""The drawer of one process: steps in the engine, files in threads."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.engine import Engine, Weights
from fastdiff.errors import DeviceLostError
from fastdiff.hosting.applying import weights_key
from fastdiff.hosting.budget import Budget
from fastdiff.pipelines import Pipeline
from fastdiff.requests.defaults import BATCH_ON_CPU
from fastdiff.requests.request import Request
from fastdiff.runs import drawing
from fastdiff.runs.drawing import Finished, Progress, Records
from fastdiff.runs.notices import find_device_notices
from fastdiff.serve.drawing.memory import memory_of_process
from fastdiff.serve.drawing.offers import Offers
from fastdiff.serve.orders.encoding import encode, encode_preview
from fastdiff.serve.orders.jobs import Counts, Job, Made
from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.orders.translation import Order

if TYPE_CHECKING:
    from PIL.Image import Image

ENCODERS = 2  # threads
ENGINE_CLOSED = "engine: it is closed"  # the beginning of its error


class EngineDrawer:
    """Draws jobs in this process, with the models on offer. The event loop waits for neither steps nor files."""

    def __init__(self, offers: Offers, limits: Limits) -> None:
        self.offers, self.budget = offers, Budget(limits.minutes)
        self.engine = Engine(max_batch=limits.batch, max_requests=limits.requests)
        self.lost: Future[BaseException] = Future()
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        self._closes = False

    def load(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Load the models, draw two steps of each at its own size, and capture the CUDA graphs of `sizes`."""
        self.offers.load()
        for card in self.offers.cards:
            pipe = self.offers.models.pipeline(card, None, self.offers.precision)
            weights = self._weights(pipe, Request(model=card.name))
            self.engine.call(pipe, partial(pipe, prompt="", num_inference_steps=2), weights=weights).result()
            if sizes:  # a CPU has no graphs, and draws each picture alone
                most = BATCH_ON_CPU if self.offers.on_cpu else None
                self.engine.warm(pipe, [(height, width) for width, height in sizes], max_batch=most)
        return find_device_notices(self.offers.models.device)

    def begin(self, job: Job) -> None:
        """Queue the drawing of a job. It may read files.

        Raises InputError for a LoRA that is gone, and for a run that would take too long.
        """
        run, models = job.order.run, self.offers.models
        self.budget.check(run)
        models.catalogue.option_files.check(run.request)
        pipe = models.pipeline(run.card, run.request.scheduler, run.request.precision)
        records = Records(run, pipe)
        records.wait()  # here, so that no step of other requests waits
        looks = bool(job.order.partial) or self.budget.minutes is not None
        draw, weights = partial(self._draw, job, pipe, records), self._weights(pipe, run.request)
        try:
            drawn = self.engine.call(pipe, draw, weights=weights, each_step=looks)
        except Exception as error:
            self._notice(error)
            raise
        # Before the job hears of an error, so that `lost` is known then.
        drawn.add_done_callback(lambda drawn: None if drawn.cancelled() else self._notice(drawn.exception()))
        job.follow(drawn)

    def counts(self) -> Counts:
        """Return what the engine has done, and the memory of this process."""
        stats = self.engine.stats()
        done = stats.steps, stats.pictures, stats.rows, stats.step_seconds, stats.decodes
        return Counts(*done, memory=memory_of_process())

    def close(self, seconds: float) -> bool:
        """End all jobs before their next step, and wait for the current one and for the encoders."""
        self._closes = True
        closing = threading.Thread(target=self.engine.close, kwargs={"cancel": True}, daemon=True)
        closing.start()
        closing.join(seconds)
        self._encoders.shutdown()
        return not closing.is_alive()

    def _notice(self, error: BaseException | None) -> None:
        """Look at the error of a job: nothing more is drawn without the device or the engine."""
        is_closed = str(error).startswith(ENGINE_CLOSED) and not self._closes
        if error is not None and (isinstance(error, DeviceLostError) or is_closed) and not self.lost.done():
            self.lost.set_result(error)

    def _weights(self, pipe: Pipeline, request: Request) -> Weights:
        return Weights(weights_key(request), partial(self.offers.models.apply, pipe, request))

    def _draw(self, job: Job, pipe: Pipeline, records: Records) -> None:
        """Draw in the engine's thread. All requests wait while this does anything but a step."""
        order = job.order
        job.begun()
        for progress in self.budget.watch(drawing.draw(order.run, pipe, records)):
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
