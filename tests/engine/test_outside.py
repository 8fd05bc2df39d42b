"""Work outside of the turn, such as to write a PNG: other requests go on meanwhile."""

import threading
from concurrent.futures import CancelledError

import pytest

from fastdiff import InputError
from fastdiff.diffusion import decoding
from fastdiff.engine import outside_turn
from tests.engine.requests import WAIT, Held, assert_same, drawing

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"prompt": "a cat", "num_inference_steps": 2}


class Outside:
    """A function that goes outside of its turn, and waits there until it is let go."""

    def __init__(self, then=lambda: None):
        self.is_there, self.gate, self.then = threading.Event(), threading.Event(), then

    def __call__(self):
        with outside_turn(), outside_turn():
            self.is_there.set()
            assert self.gate.wait(WAIT)
        return self.then()


def test_other_requests_are_drawn_meanwhile(pipe):
    expected = pipe(**OPTIONS)
    function = Outside(lambda: pipe(**OPTIONS))
    with drawing() as engine:
        away = engine.call(pipe, function)
        assert function.is_there.wait(WAIT)
        assert_same(engine.submit(pipe, **OPTIONS).result(WAIT), expected)
        function.gate.set()
    assert_same(away.result(), expected)


def test_pictures_are_made_outside_of_the_turn(pipe, monkeypatch):
    """The first request's picture is made only when the second one is drawn."""
    expected, usual = pipe(**OPTIONS), decoding._to_image
    gates, begun = [threading.Event(), threading.Event()], threading.Event()
    gates[1].set()

    def to_image(levels):
        gate = gates.pop(0)
        begun.set()
        assert gate.wait(WAIT)
        return usual(levels)

    monkeypatch.setattr(decoding, "_to_image", to_image)
    gate = gates[0]
    with drawing() as engine:
        first = engine.submit(pipe, **OPTIONS)
        assert begun.wait(WAIT)
        second = engine.submit(pipe, **OPTIONS).result(WAIT)
        assert not first.done()
        gate.set()
    for output in (first.result(), second):
        assert_same(output, expected)


def test_only_one_request_has_the_turn(pipe):
    """Requests that return while another one draws wait for it."""
    function = Outside(lambda: seen.append("returned"))
    seen: list[str] = []
    with drawing() as engine:
        engine.call(pipe, function)
        assert function.is_there.wait(WAIT)
        held = Held(engine, pipe, num_inference_steps=1)
        function.gate.set()
        held.future.add_done_callback(lambda _: seen.append("drawn"))
        assert not seen
        held.gate.set()
    assert sorted(seen) == ["drawn", "returned"]


def test_a_request_that_is_cancelled_outside_ends_there(pipe):
    seen = []
    function = Outside(lambda: seen.append("went on"))
    with drawing() as engine:
        away = engine.call(pipe, function)
        assert function.is_there.wait(WAIT)
        away.cancel()
        function.gate.set()
    assert not seen
    with pytest.raises(CancelledError):
        away.result()


def test_an_error_outside_is_the_request_s(pipe):
    def fails():
        with outside_turn():
            raise OSError("no space left")

    with drawing() as engine:
        futures = [engine.call(pipe, fails), engine.submit(pipe, **OPTIONS)]
    with pytest.raises(OSError, match="no space"):
        futures[0].result()
    assert futures[1].result()


def test_drawing_outside_is_refused(pipe):
    def draws():
        with outside_turn():
            pipe(**OPTIONS)

    with drawing() as engine:
        wrong, good = engine.call(pipe, draws), engine.submit(pipe, **OPTIONS)
    with pytest.raises(InputError, match="outside_turn: the block draws"):
        wrong.result()
    assert good.result()


def test_our_own_mistake_ends_a_request_outside_too(pipe, monkeypatch):
    function, seen = Outside(lambda: seen.append("went on")), []
    with drawing() as engine:
        away = engine.call(pipe, function)
        assert function.is_there.wait(WAIT)
        monkeypatch.setattr("fastdiff.engine.engine.next_turn", lambda *_: 1 / 0)
        other = engine.submit(pipe, **OPTIONS)
        with pytest.raises(ZeroDivisionError):
            other.result(WAIT)
        function.gate.set()
        with pytest.raises(ZeroDivisionError):
            away.result(WAIT)
    assert not seen


def test_without_an_engine_it_does_nothing():
    with outside_turn():
        pass
