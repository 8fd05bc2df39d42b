"""Engine: requests join and leave between steps and share steps. Each gets the picture that it would get alone.

A request is a function that draws, and runs in a thread of its own. Only one thread runs at a time: the engine gives a
request its turn, and the request keeps it until it asks for a step or ends. Then the engine takes waiting steps with
the same key together (`diffusion.shared_steps`). So pipelines need no locks, and the order of all work follows from the
order of the requests.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Annotated, Any, TypeVar

from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.diffusion.results import PipelineOutput, Step, TrajectoryOutput
from fastdiff.diffusion.shared_steps import AskedStep, Company, sharing
from fastdiff.engine.request import Request
from fastdiff.engine.turns import graph_size, next_turn
from fastdiff.engine.weights import Applied, Wanted, Weights, admitted, checked_weights
from fastdiff.errors import InputError
from fastdiff.pipelines.base import Pipeline
from fastdiff.schema import Interval, checked

Output = PipelineOutput | TrajectoryOutput
Count = Annotated[int, Interval(ge=1)]
OnStep = Callable[[Step], object]
Result = TypeVar("Result")


class Engine:
    """Draws requests of one process on one device, and lets them share steps.

    Submit requests from any thread. A picture has the bits that its pipeline gives it alone. On a GPU, requests with
    steps of the same shapes are computed as one batch, and each is at its own step. On the CPU they take turns. ::

        with fastdiff.Engine() as engine:
            futures = [engine.submit(pipe, prompt=prompt, seed=1) for prompt in ("a fox", "a rocket")]
            images = [future.result().images[0] for future in futures]

    Do not call the pipelines, or change their weights or adapters, while the engine draws with them. Requests with
    LoRAs of their own say so by `weights`: see `call`. A request whose model gets other weights meanwhile fails, for
    example because another request has a LoRA scale of its own.
    """

    def __init__(self, *, max_batch: int = 16, max_requests: int = 64):
        """Start the engine.

        Args:
            max_batch: the most pictures that share a step. A request for more has its steps for itself.
            max_requests: the most requests that are drawn at a time. Later ones wait for their turn.

        Raises InputError for a number below 1.
        """
        self._max_batch = checked("max_batch", max_batch, Count)
        self._max_requests = checked("max_requests", max_requests, Count)
        self._company, self._order = Company(), itertools.count()
        self._applied, self._queue = Applied(), list[Request]()
        self._active: tuple[Request, ...] = ()
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._drive, name="fastdiff-engine", daemon=True)
        self._thread.start()

    def submit(self, pipe: Pipeline, *, on_step: OnStep | None = None, **options: Any) -> "Future[Output]":
        """Queue a request, and return the future of its output, as `pipe(**options)` returns it.

        Args:
            pipe: the pipeline that draws.
            on_step: called after each step with the `Step`, in a thread of the engine; all requests wait meanwhile.
            options: the arguments of the pipeline, by name.

        Errors and cancelling are as in `call`.
        """
        return self.call(pipe, partial(_draw, pipe, options, on_step))

    def call(
        self, pipe: Pipeline, function: Callable[[], Result], *, weights: Weights | None = None
    ) -> "Future[Result]":
        """Queue a function that draws with a pipeline in any way, and return the future of its result.

        The function runs in a thread of the engine, with the context variables of the caller. The steps of its
        pipelines are shared with other requests, which wait while it does anything else. The future raises the
        function's error. Cancel the future at any time: the function's next step raises CancelledError.

        Args:
            pipe: the pipeline that the function draws with.
            function: called once.
            weights: the LoRAs and embeddings that the model needs. The engine puts them into the model before the
                function begins, if the last request of the model had others, and the error of `Weights.apply` is the
                future's. Requests with different weights of a model never run at the same time: those that run end, the
                weights change, and the oldest request that waits decides which come next. Without `weights`, a request
                takes the model as it is, and never runs beside a request with weights. So if one request of a model has
                weights, give weights to each.

        Raises InputError if the engine is closed, for wrong weights, and for an offloaded pipeline, whose models move
        during a run.
        """
        if not isinstance(pipe, Pipeline):
            raise InputError(f"pipe: {shown(pipe)} has the wrong type; give a Pipeline of fastdiff")
        if pipe.is_offloaded:
            raise InputError("pipe: its models are offloaded, so requests cannot share them; load it on one device")
        if not callable(function):
            raise InputError(f"function: {shown(function)} is not callable; give a function without arguments")
        weights, model = checked_weights(weights), pipe.denoiser

        def with_weights() -> Result:
            self._applied.apply(model, weights)
            return function()

        request = Request(with_weights, Wanted(id(model), weights))
        with self._changed:
            if self._closed:
                raise InputError("engine: it is closed; make a new Engine")
            self._queue.append(request)
            self._changed.notify()
        return request.future

    def close(self, *, cancel: bool = False) -> None:
        """Take no more requests, and wait for the others. `cancel` ends them before their next step.

        Raises InputError in a request's own thread, such as in `on_step`: it would wait for itself.
        """
        if sharing.get() is not None:
            raise InputError("engine: a request cannot close it; close it outside of on_step")
        with self._changed:
            self._closed = True
            left = (*self._queue, *self._active) if cancel else ()
            self._changed.notify()
        for request in left:
            request.future.cancel()
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)

    def _drive(self) -> None:
        """Admit requests and take steps until the engine is closed and nothing is left."""
        try:
            while self._admit():
                self._go_on()
        except BaseException as error:  # our own mistake: no request may wait forever
            with self._changed:
                self._closed, queue = True, tuple(self._queue)
            for request in queue:
                request.end(None, error)
            for request in self._active:
                if request.asked is not None:
                    request.go_on(error)

    def _go_on(self) -> None:
        """Take a step of some of the requests, and drop those that have ended."""
        if waiting := [request for request in self._active if request.asked is not None]:
            self._take(waiting)
        self._active = tuple(request for request in self._active if request.asked is not None)
        if not self._active:
            self._company = Company()  # it keeps models and texts alive

    def _admit(self) -> bool:
        """Begin requests from the queue, as many as may be drawn. Return whether there is anything to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._active or self._closed)
            room, begun = self._max_requests - len(self._active), list[Request]()
            if room and self._queue:
                active = [each.wanted for each in self._active]
                chosen = {*admitted([each.wanted for each in self._queue], active, room)}
                begun = [each for i, each in enumerate(self._queue) if i in chosen]
                self._queue = [each for i, each in enumerate(self._queue) if i not in chosen]
            self._active += tuple(begun)
        for request in begun:
            request.begin(self._order)
        return bool(self._active)

    def _take(self, requests: list[Request]) -> None:
        """Take the next step of some requests, and let each of them go on to its next."""
        turn = next_turn([request.waiting for request in requests], self._max_batch)
        chosen = [requests[i] for i in turn]
        for request in chosen:
            if request.future.cancelled():
                request.go_on(CancelledError())
            elif request.step.changed:
                request.go_on(InputError("engine: the model's weights changed during the request; draw it again"))
        chosen = [request for request in chosen if request.step_is_wanted]
        began = time.perf_counter()
        results = self._results([request.step for request in chosen])
        for request in chosen:
            request.seconds = time.perf_counter() - began
        for request, result in zip(chosen, results, strict=True):
            request.go_on(result)

    def _results(self, asked: list[AskedStep]) -> "list[tuple[Tensor, ...] | Exception]":
        """Return the result of each step, or its error. If steps fail together, each is tried alone."""
        if not asked:
            return []
        try:
            return [*self._company.take(asked, graph_size(sum(each.pictures for each in asked)))]
        except Exception as error:
            if len(asked) == 1:
                return [error]
        return [result for each in asked for result in self._results([each])]


def _draw(pipe: Pipeline, options: dict[str, Any], on_step: OnStep | None) -> Output:
    """Return the output of a call. Call `on_step` after each step."""
    with contextlib.closing(pipe.outputs(**options)) as steps:
        for step, made in steps:
            output: Output = made
            if on_step is not None:
                on_step(step)
    return output
