"""A request of the engine: a function that runs in a thread of its own, and has the turn or waits for it."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from fastdiff.diffusion.shared_steps import Asked, sharing, waited
from fastdiff.engine.turns import Waiting
from fastdiff.engine.weights import Wanted
from fastdiff.errors import InputError


class Request:
    """A function that draws. It is the `Share` of its pipelines: their work waits for the engine.

    Two threads use it, in turn: the engine's calls `begin` and `go_on`, and the request's own calls `ask` and
    `outside`. Each lock is held by the thread that waits for it.
    """

    def __init__(self, function: Callable[[], Any], wanted: Wanted, changed: threading.Condition, *, each_step: bool):
        """changed: tells the engine that the request wants its turn back. each_step: see `Share`."""
        self.wanted, self.arrived, self.each_step = wanted, time.monotonic(), each_step
        self.future: Future[Any] = Future()
        self.asked: Asked | None = None  # what it waits for
        self.seconds = 0.0  # of the work that it asked for, with the company's
        self.returns = False  # whether it was outside of its turn, and waits for it
        self.has_begun = self.has_ended = False
        self._function: Callable[[], Any] | None = function
        self._changed, self._is_outside = changed, False
        self._since, self._begun, self._order = 0, 0, itertools.count()
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._result: Any = None
        self._context = copy_context()  # of the caller

    @property
    def work(self) -> Asked:
        """Return what it waits for."""
        assert self.asked is not None  # read only while it waits
        return self.asked

    @property
    def waits(self) -> bool:
        """Whether the engine can do something for it."""
        return self.asked is not None or self.returns

    @property
    def waiting(self) -> Waiting:
        """Its place in the line."""
        return Waiting(self._since, self.work.key, self.work.pictures, self._begun)

    def begin(self, order: "itertools.count[int]") -> None:
        """Give the request its first turn; return when it waits, is outside or has ended."""
        self._order, self.has_begun, self._begun = order, True, next(order)
        thread = threading.Thread(target=self._context.run, args=(self._run,), name="fastdiff-request", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self.fail(error)
            return
        self._back.acquire()

    def goes_on_with(self, asked: Asked) -> None:
        """Let the request wait for more work, without its turn."""
        self.asked, self._since = asked, next(self._order)

    def go_on(self, result: Any = None) -> None:
        """Give the request its turn and the result, or the error, of its work; return as `begin` does."""
        self.asked, self.returns, self._result = None, False, result
        self._turn.release()
        self._back.acquire()

    def fail(self, error: BaseException) -> None:
        """End a request that has not begun."""
        self.has_ended, self._function = True, None
        self._end(None, error)

    def ask(self, asked: Asked) -> Any:
        """Wait for the result of the work. Raises InputError outside of the turn."""
        if self._is_outside:
            raise InputError("outside_turn: the block draws; draw before or after it")
        _ = asked.key  # computed here, so that its errors are this request's
        self._since, self.seconds, before = next(self._order), 0.0, time.perf_counter()
        self.asked = asked
        self._back.release()
        self._turn.acquire()
        waited.set(waited.get() + time.perf_counter() - before - self.seconds)
        return self._take_result()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """See `outside_turn`."""
        if self._is_outside:
            yield
            return
        self._is_outside = True
        self._back.release()
        try:
            yield
        finally:
            with self._changed:
                self.returns = True
                self._changed.notify()
            self._turn.acquire()
            self._is_outside = False
        self._take_result()
        if self.future.cancelled():
            raise CancelledError

    def _take_result(self) -> Any:
        result, self._result = self._result, None
        if not isinstance(result, BaseException):
            return result
        try:
            raise result
        finally:
            del result  # an error keeps its tensors alive

    def _run(self) -> None:
        sharing.set(self)
        function, self._function = self._function, None  # the future may live longer than what it draws with
        assert function is not None
        try:
            if self.future.cancelled():
                raise CancelledError
            self._end(function())
        except BaseException as error:
            self._end(None, error)
        del function
        self.has_ended = True
        self._back.release()

    def _end(self, result: Any, error: BaseException | None = None) -> None:
        """Give the future its result or error, unless it is cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
