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
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Annotated, Any, TypeVar

from annotated_types import Len

from fastdiff.arguments import shown
from fastdiff.diffusion.results import PipelineOutput, Step, TrajectoryOutput
from fastdiff.diffusion.shared_steps import Asked, AskedDecode, Company, GoesOn, Taken, sharing
from fastdiff.engine.counters import Counters, Stats
from fastdiff.engine.limits import Limits
from fastdiff.engine.request import Request
from fastdiff.engine.turns import graph_size, next_turn
from fastdiff.engine.warming import short_requests
from fastdiff.engine.weights import Applied, Wanted, Weights, admitted, checked_weights
from fastdiff.errors import InputError
from fastdiff.execution.memory import is_out_of_memory, let_go
from fastdiff.kinds import NotNegative, Pixels
from fastdiff.pipelines.base import Pipeline
from fastdiff.schema import Interval, checked

Output = PipelineOutput | TrajectoryOutput
Count = Annotated[int, Interval(ge=1)]
Sizes = Annotated[tuple[tuple[Pixels, Pixels], ...], Len(1, 64)]
OnStep = Callable[[Step], object]
AnyResult = TypeVar("AnyResult")


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

    def __init__(self, *, max_batch: int | None = 16, max_requests: int = 64):
        """Start the engine.

        Args:
            max_batch: the most pictures that share a step. A request for more has its steps for itself. None measures:
                the first step of each kind is taken by one request, and the largest graph may take 0.4 of the memory
                that is then free, at most 32 pictures. If memory runs out in a step, later ones have half the pictures.
            max_requests: the most requests that are drawn at a time. Later ones wait for their turn.

        Raises InputError for a number below 1.
        """
        self._max_batch = checked("max_batch", max_batch, Count | None)
        self._max_requests = checked("max_requests", max_requests, Count)
        self._company, self._order = Company(), itertools.count()
        self._limits, self._counters = Limits(self._max_batch), Counters()
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
        return self.call(pipe, partial(_draw, pipe, options, on_step), each_step=on_step is not None)

    def call(
        self,
        pipe: Pipeline,
        function: Callable[[], AnyResult],
        *,
        weights: Weights | None = None,
        each_step: bool = True,
    ) -> "Future[AnyResult]":
        """Queue a function that draws with a pipeline in any way, and return the future of its result.

        The function runs in a thread of the engine, with the context variables of the caller. The steps of its
        pipelines are shared with other requests, which wait while it does anything else. The future raises the
        function's error. Cancel the future at any time: the function's next step raises CancelledError.

        Args:
            pipe: the pipeline that the function draws with.
            function: called once.
            weights: the LoRAs and embeddings that the model needs. The engine puts them into the model before the
                function begins, if the last request of the model had others, and the error of `Weights.apply` is the
                future's. Requests with different weights of a model never run at the same time: the engine waits until
                the running requests end, and the oldest waiting request decides which weights come next. Without
                `weights`, a request takes the model as it is, and never runs beside a request with weights. So if one
                request of a model has weights, give weights to each.
            each_step: whether the function looks at each step of its pipelines. If not, they yield no step that the
                next one follows directly, and the engine need not wake the function between steps.

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

        def with_weights() -> AnyResult:
            self._applied.apply(model, weights)
            return function()

        request = Request(with_weights, Wanted(id(model), weights), self._changed, each_step=each_step)
        with self._changed:
            if self._closed:
                raise InputError("engine: it is closed; make a new Engine")
            self._queue.append(request)
            self._changed.notify()
        request.future.add_done_callback(partial(self._forget, request))
        return request.future

    def warm(
        self,
        pipe: Pipeline,
        sizes: Sequence[tuple[int, int]] = ((512, 512),),
        *,
        max_batch: int | None = None,
        **options: Any,
    ) -> None:
        """Draw short requests of 1, 2, 4, 8, 16 ... pictures, so that the graphs of later requests are captured.

        Each size is drawn guided and not guided. The models then keep the graphs of all these sizes.

        Args:
            pipe: the pipeline that will draw.
            sizes: heights and widths in pixels.
            max_batch: the most pictures. Default: the engine's, or 16 if the engine measures.
            options: further arguments that the pipeline needs, such as `control_image`.

        Raises the errors of `call` and of the pipeline.
        """
        most = checked("max_batch", max_batch, Count | None) or self._max_batch or 16
        sizes = checked("sizes", sizes, Sizes)
        for each in short_requests(pipe, sizes, most, options):
            self.submit(pipe, **each).result()

    def stats(self) -> Stats:
        """Return what the engine has done, and how many requests wait."""
        with self._changed:
            queue, active = self._queue, len(self._active)
            oldest = time.monotonic() - min(each.arrived for each in queue) if queue else 0.0
            return self._counters.stats(len(queue), oldest, active)

    def close(self, *, cancel: bool = False, drain: float | None = None) -> None:
        """Take no more requests, and wait for the others.

        Args:
            cancel: end the others before their next step.
            drain: wait for so many seconds, then cancel what is left.

        Raises InputError in a request's own thread, such as in `on_step`: it would wait for itself.
        """
        drain = checked("drain", drain, NotNegative | None)
        if sharing.get() is not None:
            raise InputError("engine: a request cannot close it; close it outside of on_step")
        with self._changed:
            self._closed = True
            self._changed.notify()
        if drain is not None:
            self._thread.join(min(drain, threading.TIMEOUT_MAX))
        if cancel or drain is not None:
            with self._changed:
                left = (*self._queue, *self._active)
            for request in left:
                request.future.cancel()
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)

    def _drive(self) -> None:
        """Admit requests and do their work until the engine is closed and nothing is left."""
        try:
            while self._admit():
                self._go_on()
        except BaseException as error:  # our own mistake: no request may wait forever
            self._fail(error)

    def _admit(self) -> bool:
        """Wait for something to do, and begin requests of the queue. Return False if the engine has ended."""
        with self._changed:
            while not (begun := self._admitted()) and not any(each.waits for each in self._active):
                if self._closed and not self._queue and not self._active:
                    return False
                self._changed.wait()
            self._active += tuple(begun)
        for request in begun:
            request.begin(self._order)
        return True

    def _admitted(self) -> list[Request]:
        """Take the requests that may begin from the queue."""
        room = self._max_requests - len(self._active)
        if room <= 0 or not self._queue:
            return []
        active = [each.wanted for each in self._active]
        chosen = {*admitted([each.wanted for each in self._queue], active, room)}
        begun = [each for i, each in enumerate(self._queue) if i in chosen]
        if begun:
            self._queue = [each for i, each in enumerate(self._queue) if i not in chosen]
        return begun

    def _go_on(self) -> None:
        """Let the requests that return go on, do some of the work that is asked for, and drop requests that ended."""
        for request in self._active:
            if request.returns:
                request.go_on()
        if asking := [request for request in self._active if request.asked is not None]:
            self._take(asking)
        with self._changed:
            self._active = tuple(request for request in self._active if not request.has_ended)
            if not self._active:
                self._company = Company()  # it keeps models and texts alive

    def _take(self, requests: list[Request]) -> None:
        """Do the oldest work and all that can be done with it, and let its requests go on."""
        devices = {request.work.key: request.work.device for request in requests}
        turn = next_turn([request.waiting for request in requests], lambda key: self._limits.most(key, devices[key]))
        chosen = [requests[i] for i in turn]
        wanted = []
        for request in chosen:
            if request.future.cancelled():
                request.go_on(CancelledError())
            elif request.work.changed:
                request.go_on(InputError("engine: the model's weights changed during the request; draw it again"))
            else:
                wanted.append(request)
        began, others = time.perf_counter(), len(devices) > 1
        made = self._made([each.work for each in wanted], lambda: not others and self._is_undisturbed(wanted))
        seconds = time.perf_counter() - began
        for request, (result, more, _) in zip(wanted, made, strict=True):
            request.seconds += seconds
            if more is None:
                request.go_on(result)
            else:
                request.goes_on_with(more)

    def _is_undisturbed(self, requests: Sequence[Request]) -> bool:
        """Whether these requests may take another step at once: nobody has come, returned or cancelled one."""
        has_room = self._queue and len(self._active) < self._max_requests
        returned = any(each.returns for each in self._active)
        return not (has_room or returned or any(each.future.cancelled() for each in requests))

    def _made(self, asked: list[Asked], goes_on: GoesOn) -> list[Taken]:
        """Do each piece of work; a result may be an error. If work fails together, it is tried in parts."""
        if not asked:
            return []
        count = sum(each.pictures for each in asked)
        try:
            return self._taken(asked, count, goes_on)
        except Exception as error:
            if len(asked) == 1:
                return [Taken(error)]
            is_full = is_out_of_memory(error)
        size = len(asked) // 2 if is_full else 1
        if is_full:
            self._limits.failed(asked[0].key, count)
            let_go()
        parts = [asked[i : i + size] for i in range(0, len(asked), size)]
        return [made for part in parts for made in self._made(part, goes_on)]

    def _taken(self, asked: list[Asked], count: int, goes_on: GoesOn) -> list[Taken]:
        """Do work together, and count it."""
        key, device = asked[0].key, asked[0].device
        rows = graph_size(count) if count <= self._limits.most(key, device) else count
        take = partial(self._company.take, asked, rows, goes_on)
        if isinstance(asked[0], AskedDecode):
            self._counters.decodes += 1
            return self._limits.measured(key, device, count, take)
        with self._counters.timing(device):
            made = self._limits.measured(key, device, count, take)
        self._counters.count(count, rows, made[0].steps)
        return made

    def _fail(self, error: BaseException) -> None:
        """End all requests with an error."""
        with self._changed:
            self._closed, queue, self._queue = True, self._queue, []
        for request in queue:
            request.fail(error)
        while left := [request for request in self._active if not request.has_ended]:
            for request in left:
                if not request.has_begun:
                    request.fail(error)
                elif request.waits:
                    request.go_on(error)
            with self._changed:
                while not any(each.waits or each.has_ended for each in left):
                    self._changed.wait()

    def _forget(self, request: Request, future: "Future[Any]") -> None:
        """Drop a request that was cancelled in the queue."""
        with self._changed:
            if not future.cancelled() or request not in self._queue:
                return
            self._queue.remove(request)
            self._changed.notify()
        request.fail(CancelledError())


def _draw(pipe: Pipeline, options: dict[str, Any], on_step: OnStep | None) -> Output:
    """Return the output of a call. Call `on_step` after each step."""
    with contextlib.closing(pipe.outputs(**options)) as steps:
        for step, made in steps:
            output: Output = made
            if on_step is not None:
                on_step(step)
    return output
