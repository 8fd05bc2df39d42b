"""Tune forwards: find their shapes, judge each shape's candidates, and keep what makes the whole forward faster."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import Any

import torch

from fastdiff.errors import InputError
from fastdiff.execution.devices import naming_lost_device
from fastdiff.kernels.plans.tuning import NO_TABLE, Table, using
from fastdiff.tuning import tables, timing
from fastdiff.tuning.forwards import dtype_of, forward
from fastdiff.tuning.judging import timed, tune
from fastdiff.tuning.models import WORKLOADS
from fastdiff.tuning.shapes import Shape, compile_candidates, shapes_of

FORWARD_GAIN = 0.995  # a forward's choices stay if it takes at most this share of its usual time
CALLS_OF_COMPARING = 18  # of a long forward in `_compare`: warm-ups, and two times five groups

Call = Callable[[], Any]
Make = Callable[[], Call]  # builds a model, and returns a call of it
clock = time.monotonic


def find_card() -> str:
    """Return the name of the card to tune. Raises InputError without a GPU or without Triton."""
    if find_spec("triton") is None:
        raise InputError("tune: Triton is not installed; pip install triton")
    if not torch.cuda.is_available():
        raise InputError("tune: no GPU was found; only GPU kernels can be tuned")
    return torch.cuda.get_device_name(timing.DEVICE)


def of_workloads(names: list[str]) -> dict[str, Make]:
    """Return a function for each workload that builds its forward."""
    return {name: partial(forward, *WORKLOADS[name], dtype_of(name)) for name in names}


@dataclass
class Tuning:
    """A run of the tuner. Forwards share the time evenly; within one, shapes that take most of its time come first."""

    forwards: Mapping[str, Make]
    card: str
    minutes: float | None = None  # None: as long as it takes
    wrong: list[str] = field(default_factory=list)  # a line for each shape or forward that failed
    unfinished: list[str] = field(default_factory=list)  # a line for each forward with shapes that the time left out

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each shape once it is in the table, and one without `operation` at the end of each forward.

        Shapes in the table of an earlier run are not measured again. After the time is over, no shape is begun.
        """
        torch.backends.cudnn.allow_tf32 = False  # the check compares with exact float32
        end = clock() + 60 * (inf if self.minutes is None else self.minutes)
        for place, (name, make) in enumerate(self.forwards.items()):
            left = end - clock()
            if left <= 0:
                self.unfinished.append(f"{name}: not begun")
                continue
            with torch.inference_mode(), naming_lost_device():
                try:
                    call = make()
                    yield from self._tune(name, call, end - left + left / (len(self.forwards) - place))
                except torch.OutOfMemoryError as error:
                    self.wrong.append(f"{name}: {error}")

    def _tune(self, name: str, call: Call, end: float) -> Iterator[dict[str, Any]]:
        """Tune the shapes of a forward until the time `end`, and compare it with and without its choices."""
        _within(NO_TABLE, call)  # compiles in parallel, which recording does not
        shapes, before = shapes_of(call), tables.kept(self.card)
        missing = [shape for shape in shapes if not before.has(shape.operation, shape.name)]
        if missing:
            end -= CALLS_OF_COMPARING * _seconds(call)
        begun, measured, failures = clock(), len(shapes) - len(missing), len(self.wrong)
        for i, shape in enumerate(self._by_value(missing, end)):
            if clock() >= end:
                break
            row = self._row(shape)
            if row is None:
                continue
            tables.keep(self.card, {"workload": name} | row)
            measured += 1
            left = min((clock() - begun) / (i + 1) * (len(missing) - i - 1), max(0.0, end - clock()))
            yield {"workload": name} | row | {"measured": measured, "shapes": len(shapes), "seconds_left": left}
        left_out = len(shapes) - measured - (len(self.wrong) - failures)
        if left_out:
            self.unfinished.append(f"{name}: {left_out} of {len(shapes)} shapes")
        if measured:
            yield self._compare(name, call, [(shape.operation, shape.name) for shape in shapes], measured)

    def _by_value(self, shapes: list[Shape], end: float) -> list[Shape]:
        """Return the shapes, the ones with most time in the forward first. After `end`, none is timed."""

        def value(shape: Shape) -> float:
            if clock() >= end:
                return 0.0
            try:
                (milliseconds,) = timed(shape, shape.candidates[:1], seconds=0.002).values()
            except torch.OutOfMemoryError:
                return 0.0
            return shape.lookups * milliseconds

        return sorted(shapes, key=value, reverse=True)

    def _row(self, shape: Shape) -> dict[str, Any] | None:
        """Return the result row of a shape; None if its checks fail or it runs out of memory."""
        try:
            compile_candidates([shape])
            return tune(shape)
        except (ArithmeticError, torch.OutOfMemoryError) as error:
            self.wrong.append(f"{shape.operation} {shape.name}: {error}")
            return None

    def _compare(self, name: str, call: Call, places: list[tables.Place], measured: int) -> dict[str, Any]:
        """Time a forward with and without its choices, in turns, and drop its own choices if it gains nothing.

        A choice belongs to the forward for which it was measured. Return the row of the forward.
        """
        kept = tables.kept(self.card)
        chosen = kept.table_of(places)
        facts: dict[str, Any] = {"measured": measured, "shapes": len(places)}
        if kept.forwards.get(name, {}).items() >= facts.items():
            return {"workload": name} | kept.forwards[name]
        facts |= {"choices": sum(map(len, chosen.choices.values())), "dropped": 0}
        mine: list[tables.Place] = []
        if facts["choices"]:
            calls = {"usual": partial(_within, NO_TABLE, call), "tuned": partial(_within, chosen, call)}
            times = timing.measure(calls, graph=False, seconds=0.1)  # our models replay graphs of their own
            facts |= {"usual_ms": times["usual"], "tuned_ms": times["tuned"]}
            if times["tuned"] > FORWARD_GAIN * times["usual"]:
                found = ((operation, shape) for operation in chosen.choices for shape in chosen.choices[operation])
                mine = [
                    (operation, shape) for operation, shape in found if kept.rows[operation][shape]["workload"] == name
                ]
                facts |= {"dropped": len(mine)}
        tables.keep_forward(self.card, name, facts, mine)
        return {"workload": name} | facts


def _seconds(call: Call) -> float:
    """Return the seconds of a forward that has run once before. The first of two calls captures its graphs."""
    _within(NO_TABLE, call)
    begun = clock()
    _within(NO_TABLE, call)
    return clock() - begun


def _within(table: Table, call: Call) -> Any:
    with using(table):
        return call()
