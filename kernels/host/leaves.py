"""Leaves: functions that a trace of a CPU forward records as one call, instead of the torch functions inside them.

A leaf may read numbers on the host, which nothing else in a traced function may do. A leaf may also `pack` its
weight: a trace then calls it with a weight in a layout that the leaf prepares once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

Pack = Callable[..., tuple[Any, ...]]


class Leaf:
    """A function of positional arguments, tensors among them, that returns one new tensor."""

    def __init__(self, function: Callable[..., Tensor]):
        self.__name__, self.__doc__, self.__wrapped__ = function.__name__, function.__doc__, function
        self.pack: Pack | None = None

    def __call__(self, *args: Any) -> Tensor:
        record = _record.get()
        return self.__wrapped__(*args) if record is None else record(self, args)

    def packs(self, pack: Pack) -> Pack:
        """Use `pack` for a weight that is the same in many calls. The weight is the second argument of the leaf.

        `pack` takes the arguments of the leaf, and may read the values of the weight only. It returns the arguments
        with a weight that gives the same bits in less time.
        """
        self.pack = pack
        return pack


_record: ContextVar[Callable[[Leaf, tuple[Any, ...]], Tensor] | None] = ContextVar("record", default=None)


@contextmanager
def recording_leaves(record: Callable[[Leaf, tuple[Any, ...]], Tensor] | None) -> Iterator[None]:
    """Call `record` with each leaf and its arguments, instead of the leaf. None calls the leaves again."""
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)


def is_traced() -> bool:
    """Whether this is a call of a traced function, whose arguments an earlier call has checked."""
    return _record.get() is not None
