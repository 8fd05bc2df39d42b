"""Shared: what all sessions of the page share, which are the models, the engine, the queue and the time limit."""

import threading
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from fastdiff.engine import Engine, Weights
from fastdiff.hosting.applying import weights_key
from fastdiff.hosting.budget import Budget
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.hosting.models import MAX_LOADED, Models
from fastdiff.pipelines import Pipeline
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run
from fastdiff.ui.queueing.messages import PROBLEMS
from fastdiff.ui.queueing.queue import Queue, when_ended

AT_ONCE = 16  # runs that are drawn at once, each of another user
T = TypeVar("T")


class Shared:
    """The models that the page draws with, the engine that runs share, the queue, and the time limit of a request."""

    def __init__(self, models: Models, max_minutes: float | None = None) -> None:
        """max_minutes: the limit of one request; None: no limit."""
        self.models = models
        self.budget = Budget(max_minutes)
        self.queue = Queue(PROBLEMS, AT_ONCE, MAX_LOADED)
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    @property
    def catalogue(self) -> Catalogue:
        return self.models.catalogue

    @property
    def engine(self) -> Engine:
        """The engine, which begins with the first run."""
        with self._lock:
            if self._engine is None:
                self._engine = Engine(max_requests=AT_ONCE)
            return self._engine

    def warm_up(self, name: str) -> None:
        """Load a model and draw one step, so the first request finds the model ready."""
        plain = Request(model=name)
        self.models.warm_up(
            name, lambda pipe, step: self.engine.call(pipe, step, weights=self._weights(pipe, plain)).result()
        )

    def in_engine(
        self, run: Run, pipe: Pipeline, items: Callable[[], Generator[T, None, None]]
    ) -> Generator[T, None, None]:
        """Yield what a generator yields that draws a run with a pipeline. The generator runs in the engine.

        The steps are shared with other runs. The model has the LoRAs and embeddings of the run. The generator waits
        at each item until the next is asked for, and all runs wait meanwhile. It ends before its next step once the job
        of this thread has ended.

        Raises the errors of the generator and of `Models.apply`.
        """
        key = (object(),) if run.names_loras else ()  # a run that changes the LoRAs on its way is drawn without others
        weights = self._weights(pipe, run.request, *key)
        return _relayed(items, lambda take: self.engine.call(pipe, take, weights=weights))

    def _weights(self, pipe: Pipeline, request: Request, *key: object) -> Weights:
        return Weights((weights_key(request), *key), partial(self.models.apply, pipe, request))


_END: Any = object()


def _relayed(
    items: Callable[[], Generator[T, None, None]], call: Callable[[Callable[[], None]], "Future[None]"]
) -> Generator[T, None, None]:
    """Yield the items of a generator that runs in another thread, one by one.

    call: begins to call a function in the other thread.
    """
    made: SimpleQueue[T] = SimpleQueue()
    asked, lock, over = threading.Semaphore(0), threading.Lock(), threading.Event()
    begun = stopped = False

    def take() -> None:
        """Take the items, until no more are asked for."""
        nonlocal begun
        with lock:
            begun = not stopped
        try:
            with closing(items()) as taken:
                while begun and not stopped and (item := next(taken, _END)) is not _END:
                    made.put(item)
                    asked.acquire()
        finally:
            over.set()

    def stop() -> None:
        nonlocal stopped
        with lock:
            stopped = True
        future.cancel()
        asked.release()

    future = call(take)
    future.add_done_callback(lambda _: made.put(_END))
    when_ended(stop)
    try:
        while (item := made.get()) is not _END:
            yield item
            asked.release()
        if not stopped:
            future.result()
    finally:
        stop()
        if begun:
            over.wait()  # for what its last step does


def models_of(runs: Iterable[Run]) -> frozenset[Hashable]:
    """Return what identifies the models of runs."""
    return frozenset((run.card.source, run.request.precision) for run in runs)
