"""The shapes for which a forward looks up a tuning table, and their candidates."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.kernels.host.recording import Recorder, record
from fastdiff.kernels.plans.tuning import Table, using
from fastdiff.tuning import timing


class Shape(NamedTuple):
    """A shape of an operation, one call with this shape, and the candidates for it."""

    operation: str
    name: str
    candidates: list[tuple]  # the usual one first
    run: Callable[[], Any]
    reference: Callable[..., Any]  # takes the arguments in any dtype
    arguments: tuple[tuple, dict[str, Any]]
    lookups: int = 1  # in a forward

    def choosing(self, candidate: tuple) -> Any:
        """Return a context in which the operation uses a candidate."""
        return using(Table("one candidate", {self.operation: {self.name: list(candidate)}}))


class Asked(Recorder):
    """A table that always returns the usual choice, and keeps the first call of each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[tuple] = []  # of the calls in progress, the innermost last
        self.shapes: dict[tuple[str, str], Shape] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def call(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        self.arguments.append((operation, args, kwargs))
        with super().call(operation, args, kwargs):
            yield
        self.arguments.pop()

    def choose(self, operation: str, name: str, usual: Any, candidates: Callable) -> Any:
        """Return the usual choice; see `kernels.plans.tuning.Table.choose`."""
        self.counts[operation, name] += 1
        if (operation, name) not in self.shapes:
            called, args, kwargs = self.arguments[-1]
            each = list(dict.fromkeys([usual, *candidates()]))
            run = partial(called, *args, **kwargs)
            self.shapes[operation, name] = Shape(operation, name, each, run, called.reference, (args, kwargs))
        return usual


def shapes_of(forward: Callable[[], Any]) -> list[Shape]:
    """Return the shapes for which a forward looks up a table."""
    asked: Any = Asked()
    with using(asked), record(timing.DEVICE, asked):
        forward()
    return [shape._replace(lookups=asked.counts[place]) for place, shape in asked.shapes.items()]


def compile_candidates(shapes: list[Shape]) -> None:
    """Compile the kernels of all candidates in parallel. A candidate that does not compile fails later, when tried."""
    with only_compiling():
        for shape in shapes:
            for candidate in shape.candidates:
                with shape.choosing(candidate), suppress(Exception):
                    shape.run()
