"""Files written beside the drawing: in order, whatever ends the run, and with room for so many at most."""

import threading
from types import SimpleNamespace

import pytest

from fastdiff.runs import writing
from fastdiff.runs.writing import Writer, write_beside


def steps_of(batches: int, size: int = 2, told=lambda batch, step: None):
    """Two steps of each batch; the second one has its pictures: their numbers."""
    for batch in range(batches):
        for step in range(2):
            told(batch, step)
            finished = range(batch * size, (batch + 1) * size) if step else ()
            yield SimpleNamespace(name=(batch, step), finished=finished)


def shown(results) -> list[tuple]:
    return [(progress.name, written) for progress, written in results]


def test_drawing_goes_on_while_a_picture_is_written():
    drawing_on = threading.Event()

    def told(batch, step):
        if (batch, step) == (1, 1):
            drawing_on.set()

    def write(number):
        assert number or drawing_on.wait(30)
        return number

    results = shown(write_beside(steps_of(3, told=told), write))
    assert [name for name, _ in results[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [written for _, written in results[:3]] == [[], [], []], "the first is held up until the second batch's end"
    assert [number for _, written in results for number in written] == list(range(6))


def test_at_the_end_each_comes_as_soon_as_it_is_written():
    room = threading.Semaphore(0)
    results = write_beside(steps_of(1, size=3), lambda number: room.acquire() and number)
    assert shown([next(results), next(results)]) == [((0, 0), []), ((0, 1), [])]
    for number in range(3):
        room.release()
        assert shown([next(results)]) == [((0, 1), [number])]


def test_who_waits_sees_a_batch_before_the_next():
    assert shown(write_beside(steps_of(2), lambda number: -number, wait=True)) == [
        ((0, 0), []),
        ((0, 1), [0, -1]),
        ((1, 0), []),
        ((1, 1), [-2, -3]),
    ]


@pytest.mark.parametrize("wait", [False, True])
def test_what_is_finished_is_handed_out_before_an_error_of_drawing(wait):
    def fail(batch, step):
        if batch == 1:
            raise ValueError("NaN")

    got: list[str] = []
    with pytest.raises(ValueError, match="NaN"):
        for _, written in write_beside(steps_of(2, told=fail), str, wait=wait):
            got += written
    assert got == ["0", "1"]


def test_leaving_writes_what_is_finished():
    written, begun = [], threading.Event()

    def write(number):
        assert begun.wait(30)
        written.append(number)

    results = write_beside(steps_of(2), write)
    next(results), next(results)
    threading.Timer(0.05, begun.set).start()
    results.close()
    assert written == [0, 1]


@pytest.mark.parametrize("wait", [False, True])
def test_an_error_of_writing_ends_it(wait):
    drawn = []

    def write(number):
        if number == 1:
            raise OSError("cannot write 1; make room")
        return number

    with pytest.raises(OSError, match="cannot write 1; make room"):
        for _ in write_beside(steps_of(100, told=lambda *name: drawn.append(name)), write, wait=wait):
            threading.Event().wait(0.001)
    assert len(drawn) < 100


def test_drawing_waits_where_too_many_would_pile_up(monkeypatch):
    monkeypatch.setattr(writing, "WAITING", 3)
    go, given = threading.Event(), []
    with Writer() as writer:

        def give():
            for number in range(5):
                writer.submit(go.wait, 30)
                given.append(number)

        thread = threading.Thread(target=give)
        thread.start()
        thread.join(0.1)
        assert given == [0, 1, 2] and thread.is_alive()
        go.set()
        thread.join(30)
    assert given == [0, 1, 2, 3, 4]
