"""Engine: requests join and leave between steps and share steps. Each gets the picture that it would get alone.

A request runs its pipeline's own code in a thread of its own. Only one thread runs at a time: the engine gives a
request its turn, and the request keeps it until it asks for a step or ends. Then the engine takes waiting steps with
the same key together (`diffusion.shared_steps`). So pipelines need no locks, and the order of all work follows from the
order of the requests.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextvars import copy_context
from typing import Annotated, Any

from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.diffusion.results import PipelineOutput, Step, TrajectoryOutput
from fastdiff.diffusion.shared_steps import AskedStep, Company, sharing
from fastdiff.engine.turns import Waiting, graph_size, next_turn
from fastdiff.errors import InputError
from fastdiff.pipelines.base import Pipeline
from fastdiff.schema import Interval, checked

Output = PipelineOutput | TrajectoryOutput
Count = Annotated[int, Interval(ge=1)]
OnStep = Callable[[Step], object]


class Engine:
    """Draws requests of one process on one device, and lets them share steps.

    Submit requests from any thread. A picture has the bits that its pipeline gives it alone. On a GPU, requests with
    steps of the same shapes are computed as one batch, and each is at its own step. On the CPU they take turns. ::

        with fastdiff.Engine() as engine:
            futures = [engine.submit(pipe, prompt=prompt, seed=1) for prompt in ("a fox", "a rocket")]
            images = [future.result().images[0] for future in futures]

    Do not call the pipelines, or change their weights or adapters, while the engine draws with them. A request whose
    model gets other weights meanwhile fails, for example because another request has a LoRA scale of its own.
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
        self._queue: deque[_Request] = deque()
        self._active: tuple[_Request, ...] = ()
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._drive, name="fastdiff-engine", daemon=True)
        self._thread.start()

    def submit(self, pipe: Pipeline, *, on_step: OnStep | None = None, **options: Any) -> "Future[Output]":
        """Queue a request, and return the future of its output, as `pipe(**options)` returns it.

        The future raises what the pipeline would raise. Cancel it at any time: the request ends before its next step.

        Args:
            pipe: the pipeline that draws.
            on_step: called after each step with the `Step`, in a thread of the engine; all requests wait meanwhile.
            options: the arguments of the pipeline, by name.

        Raises InputError if the engine is closed, and for an offloaded pipeline, whose models move during a run.
        """
        if not isinstance(pipe, Pipeline):
            raise InputError(f"pipe: {shown(pipe)} has the wrong type; give a Pipeline of fastdiff")
        if pipe.is_offloaded:
            raise InputError("pipe: its models are offloaded, so requests cannot share them; load it on one device")
        request = _Request(pipe, options, on_step)
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
                request.end(error)
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
            room = self._max_requests - len(self._active)
            begun = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
            self._active += tuple(begun)
        for request in begun:
            request.begin(self._order)
        return bool(self._active)

    def _take(self, requests: "list[_Request]") -> None:
        """Take the next step of some requests, and let each of them go on to its next."""
        turn = next_turn([request.waiting for request in requests], self._max_batch)
        chosen = [requests[i] for i in turn]
        for request in chosen:
            if request.future.cancelled():
                request.go_on(CancelledError())
            elif request.step.changed:
                request.go_on(InputError("engine: the model's weights changed during the request; draw it again"))
        chosen = [request for request in chosen if request.step_is_wanted]
        for request, result in zip(chosen, self._results([request.step for request in chosen]), strict=True):
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


class _Request:
    """One call of a pipeline, which has the turn or waits for a step."""

    def __init__(self, pipe: Pipeline, options: dict[str, Any], on_step: OnStep | None):
        self.pipe, self.options, self.on_step = pipe, options, on_step
        self.future: Future[Output] = Future()
        self.asked: AskedStep | None = None
        self._since, self._order = 0, itertools.count()
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._result: tuple[Tensor, ...] | BaseException = ()
        self._context = copy_context()  # of the caller

    @property
    def step(self) -> AskedStep:
        assert self.asked is not None  # read only while it waits
        return self.asked

    @property
    def step_is_wanted(self) -> bool:
        return self.asked is not None and not self.future.cancelled()

    @property
    def waiting(self) -> Waiting:
        return Waiting(self._since, self.step.key, self.step.pictures)

    def begin(self, order: "itertools.count[int]") -> None:
        """Give the request its first turn; return when it waits for a step or has ended."""
        self._order = order
        threading.Thread(target=self._context.run, args=(self._run,), name="fastdiff-request", daemon=True).start()
        self._back.acquire()

    def go_on(self, result: "tuple[Tensor, ...] | BaseException") -> None:
        """Give the request the result of its step and its turn; return when it waits again or has ended."""
        self.asked, self._result = None, result
        self._turn.release()
        self._back.acquire()

    def end(self, result: Output | BaseException) -> None:
        """Give the future its result, unless it is cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)

    def _run(self) -> None:
        sharing.set(self._ask)
        try:
            self.end(CancelledError() if self.future.cancelled() else self._draw())
        except BaseException as error:
            self.end(error)
        self._back.release()

    def _draw(self) -> Output:
        with contextlib.closing(self.pipe.outputs(**self.options)) as steps:
            for step, made in steps:
                output = made
                if self.on_step is not None:
                    self.on_step(step)
        return output

    def _ask(self, step: AskedStep) -> tuple[Tensor, ...]:
        """Wait for the result of a step."""
        _ = step.key  # computed here, so that its errors are this request's
        self.asked, self._since = step, next(self._order)
        self._back.release()
        self._turn.acquire()
        result, self._result = self._result, ()
        if not isinstance(result, BaseException):
            return result
        try:
            raise result
        finally:
            del result  # an error keeps its tensors alive
