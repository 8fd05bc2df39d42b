"""A request of the engine: a function that runs in a thread of its own, and has the turn or waits for a step."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextvars import copy_context
from typing import Any

from torch import Tensor

from fastdiff.diffusion.shared_steps import AskedStep, sharing, waited
from fastdiff.engine.turns import Waiting
from fastdiff.engine.weights import Wanted


class Request:
    """A function that draws. Each step of its pipelines waits for the engine."""

    def __init__(self, function: Callable[[], Any], wanted: Wanted):
        self.wanted = wanted
        self.future: Future[Any] = Future()
        self.asked: AskedStep | None = None
        self.seconds = 0.0  # of its last step, with the company's
        self._function: Callable[[], Any] | None = function
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

    def go_on(self, result: tuple[Tensor, ...] | BaseException) -> None:
        """Give the request the result of its step and its turn; return when it waits again or has ended."""
        self.asked, self._result = None, result
        self._turn.release()
        self._back.acquire()

    def end(self, result: Any, error: BaseException | None = None) -> None:
        """Give the future its result or error, unless it is cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)

    def _run(self) -> None:
        sharing.set(self._ask)
        function, self._function = self._function, None  # the future may live longer than what it draws with
        assert function is not None
        try:
            if self.future.cancelled():
                raise CancelledError
            self.end(function())
        except BaseException as error:
            self.end(None, error)
        self._back.release()

    def _ask(self, step: AskedStep) -> tuple[Tensor, ...]:
        """Wait for the result of a step."""
        _ = step.key  # computed here, so that its errors are this request's
        self.asked, self._since = step, next(self._order)
        self.seconds, before = 0.0, time.perf_counter()
        self._back.release()
        self._turn.acquire()
        waited.set(waited.get() + time.perf_counter() - before - self.seconds)
        result, self._result = self._result, ()
        if not isinstance(result, BaseException):
            return result
        try:
            raise result
        finally:
            del result  # an error keeps its tensors alive
