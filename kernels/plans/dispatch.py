"""Operations: callables that run a call in the way that `choices` decides."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.recording import because, besides, recorder
from fastdiff.kernels.plans.choices import decide

P = ParamSpec("P")
R = TypeVar("R")


class Operation(Generic[P, R]):
    """An operation, called with the fields of its `Call`. Tests call a way directly, by the method of its name."""

    def __init__(self, name: str, parse: Callable[P, Call[R]]):
        self.__name__, self.__doc__, self.__module__ = name, parse.__doc__, parse.__module__
        self.parse = self.__wrapped__ = parse

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        listener = recorder()
        if listener is None:
            return run(self.parse(*args, **kwargs))
        with listener.call(self, args, kwargs):
            return run(self.parse(*args, **kwargs))

    def reference(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.parse(*args, **kwargs).reference()

    def library(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.parse(*args, **kwargs).library()

    def kernel(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.parse(*args, **kwargs).kernel()

    def hopper(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.parse(*args, **kwargs).hopper()


def run(call: Call[R]) -> R:
    """Run a call in the chosen way, and tell the recorder why."""
    decision = decide(call)
    if decision.why:
        because(decision.why)
    y: R = getattr(call, decision.way)()
    if decision.passed_over:
        besides(decision.passed_over)
    return y
