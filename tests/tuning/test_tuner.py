"""A run of the tuner: its order, its time, how it goes on, and what it keeps in the end."""

from functools import partial

import pytest
import torch

import fastdiff
from fastdiff.errors import DeviceLostError
from fastdiff.kernels.plans.tuning import Table, current, read_table, using
from fastdiff.tuning import judging, tables, timing, tuner
from tests.support.tiny import UNET
from tests.tuning.doubling import CPU, FAST, doubling

CARD = "NVIDIA Tiny"


@pytest.fixture(autouse=True)
def card(tunes, monkeypatch):
    monkeypatch.setattr(tuner, "compile_candidates", lambda shapes: None)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test sets it."""
    now = [0.0]
    monkeypatch.setattr(tuner, "clock", lambda: now[0])
    return now


def forward(*counts: tuple[int, int]):
    """Return a function that makes a forward with these (length, count) doublings."""
    inputs = [torch.randn(length) for length, count in counts for _ in range(count)]
    return lambda: lambda: [doubling(x) for x in inputs]


def tuned(*names: str, **counts):
    """Run the tuner on forwards `name=[(length, count), ...]`. Return the tuning and its rows."""
    tuning = tuner.Tuning({name: forward(*counts[name]) for name in counts}, CARD)
    return tuning, list(tuning.rows())


def shapes(rows) -> list[str]:
    return [row["shape"] for row in rows if "operation" in row]


def test_shapes_with_most_time_in_the_forward_come_first(monkeypatch):
    milliseconds = {"8": 1.0, "16": 5.0, "32": 2.0}

    def timed(shape, candidates, seconds):
        return {candidate: milliseconds[shape.name] for candidate in candidates}

    monkeypatch.setattr(tuner, "timed", timed)
    _, rows = tuned(a=[(8, 1), (16, 1), (32, 3)])
    assert shapes(rows) == ["32", "16", "8"]
    assert [row["measured"] for row in rows] == [1, 2, 3, 3]


def test_after_the_time_no_shape_is_begun(clock, monkeypatch):
    def slow(shape, real=judging.tune):
        clock[0] += 20
        return real(shape)

    monkeypatch.setattr(tuner, "tune", slow)
    tuning = tuner.Tuning({"a": forward(*((n, 1) for n in range(1, 7)))}, CARD, minutes=1)
    rows = list(tuning.rows())
    assert (len(shapes(rows)), clock[0]) == (3, 60)
    assert tuning.unfinished == ["a: 3 of 6 shapes"]
    assert [row["seconds_left"] for row in rows[:-1]] == [40, 20, 0]
    assert rows[-1]["tuned_ms"] == 9.0, "what was measured is compared"
    again = tuner.Tuning({"a": forward(*((n, 1) for n in range(1, 7)))}, CARD)
    rest = list(again.rows())
    assert sorted(shapes(rows) + shapes(rest)) == list("123456")
    assert rest[0]["measured"] == 4 and again.unfinished == []


def test_time_for_the_comparison_is_kept(clock):
    def slow_forward():
        clock[0] += 1
        return doubling(torch.ones(8))

    tuning = tuner.Tuning({"a": lambda: slow_forward}, CARD, minutes=0.3)  # less than 18 forwards and one
    assert list(tuning.rows()) == [] and tuning.unfinished == ["a: 1 of 1 shapes"]


def test_forwards_share_the_time(clock, monkeypatch):
    def slow(shape, real=judging.tune):
        clock[0] += 10
        return real(shape)

    monkeypatch.setattr(tuner, "tune", slow)
    makes = {"a": forward(*((n, 1) for n in range(1, 9))), "b": forward(*((n, 1) for n in range(11, 19)))}
    tuning = tuner.Tuning(makes, CARD, minutes=1)
    rows = list(tuning.rows())
    assert [sum(row["workload"] == name and "operation" in row for row in rows) for name in "ab"] == [3, 3]
    assert tuning.unfinished == ["a: 5 of 8 shapes", "b: 5 of 8 shapes"]


def test_a_forward_after_the_time_is_not_begun(clock):
    def load():
        clock[0] += 100
        return forward((8, 1))()

    tuning = tuner.Tuning({"a": load, "b": pytest.fail}, CARD, minutes=1)
    list(tuning.rows())
    assert tuning.unfinished == ["a: 1 of 1 shapes", "b: not begun"]


def test_a_run_that_ends_anywhere_is_gone_on_with(monkeypatch):
    rows = tuner.Tuning({"a": forward((8, 1), (16, 1))}, CARD).rows()
    first = next(rows)["shape"]
    rows.close()  # as Ctrl-C ends it, before the comparison
    assert read_table(tables.table_of(CARD)).choices == {"doubling": {first: list(FAST)}}
    _, rest = tuned(a=[(8, 1), (16, 1)])
    assert shapes(rest) == [{"8": "16", "16": "8"}[first]] and "tuned_ms" in rest[-1]


def test_nothing_is_measured_twice(monkeypatch):
    _, before = tuned(a=[(8, 1), (16, 1)])
    monkeypatch.setattr(timing, "measure", pytest.fail)
    _, after = tuned(a=[(8, 1), (16, 1)])
    assert after == [before[-1]]


def test_a_shape_without_a_gain_is_not_measured_again(tunes, monkeypatch):
    tunes[FAST] = 2.0
    tuned(a=[(8, 1)])
    monkeypatch.setattr(tuner, "tune", pytest.fail)
    assert shapes(tuned(b=[(8, 1)])[1]) == []


def test_a_comparison_that_was_cut_off_is_made(tunes):
    tuned(a=[(8, 1)])
    rows = tuner.Tuning({"a": forward((8, 1), (16, 1))}, CARD).rows()
    next(rows)
    rows.close()
    tunes["tuned"] = 8.0
    assert tuned(a=[(8, 1), (16, 1)])[1][-1]["tuned_ms"] == 8.0


def test_the_forward_runs_with_its_choices_and_without(monkeypatch):
    seen = {}

    def measure(calls, *, seconds, graph=True):
        if "tuned" in calls:
            assert graph is False
            seen.update({name: call() for name, call in calls.items()})
        return {name: 1.0 if "fast" in name or name == "tuned" else 2.0 for name in calls}

    def makes():
        def call():
            doubling(x)
            return getattr(current(CPU), "choices", None)

        return call

    x = torch.randn(8)
    tables.keep(CARD, {"workload": "b"} | judging.tune(tuner.shapes_of(partial(doubling, torch.randn(3)))[0]))
    monkeypatch.setattr(timing, "measure", measure)
    list(tuner.Tuning({"a": makes}, CARD).rows())
    assert seen == {"usual": {}, "tuned": {"doubling": {"8": list(FAST)}}}


def test_a_table_has_graphs_of_its_own():
    model, function = fastdiff.UNet2DModel(**UNET), torch.neg
    usual = model.graphed("step", function)
    with using(Table("another")):
        assert model.graphed("step", function) is model.graphed("step", function) is not usual
    assert model.graphed("step", function) is usual


@pytest.mark.parametrize(("milliseconds", "dropped"), [(9.94, 0), (9.96, 1), (11.0, 1)])
def test_choices_that_do_not_make_the_forward_faster_are_dropped(tunes, milliseconds, dropped):
    tuned(a=[(8, 1)])
    tunes["tuned"] = milliseconds
    (*_, row) = tuned(b=[(8, 1), (16, 1)])[1]
    assert (row["choices"], row["dropped"]) == (2, dropped)
    assert set(read_table(tables.table_of(CARD)).choices["doubling"]) == {"8"} | ({"16"} if not dropped else set())
    assert shapes(tuned(b=[(8, 1), (16, 1)])[1]) == [], "they count as measured"


def test_shapes_that_fail_are_counted_and_tried_again(monkeypatch):
    def failing(shape, real=judging.tune):
        if shape.name == "8":
            raise ArithmeticError("the usual choice has an error of 3")
        return real(shape)

    monkeypatch.setattr(tuner, "tune", failing)
    tuning, rows = tuned(a=[(8, 1), (16, 1)])
    assert tuning.wrong == ["doubling 8: the usual choice has an error of 3"] and tuning.unfinished == []
    assert rows[-1]["measured"] == 1
    monkeypatch.setattr(tuner, "tune", judging.tune)
    assert shapes(tuned(a=[(8, 1), (16, 1)])[1]) == ["8"]


def test_a_gpu_that_fails_is_one_error(monkeypatch):
    def lose(shape):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(tuner, "tune", lose)
    with pytest.raises(DeviceLostError, match="the GPU failed"):
        tuned(a=[(8, 1)])
