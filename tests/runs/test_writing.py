"""Files written in threads while drawing: in order, however the run ends, and with a bounded queue."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from PIL import Image

from fastdiff.runs import writing
from fastdiff.runs.writing import Writer, write_beside


class Picture(int):
    """A stand-in for Finished, identified by the number of its picture."""

    image = Image.new("RGB", (8, 4))


@dataclass(frozen=True)
class Step:
    """A stand-in for Progress."""

    name: tuple[int, int]  # batch, and step in the batch
    finished: Sequence[Picture]


def steps_of(batches: int, size: int = 2, told=lambda batch, step: None):
    """Two steps per batch. The second one has the batch's pictures, as numbers."""
    for batch in range(batches):
        for step in range(2):
            told(batch, step)
            finished = [*map(Picture, range(batch * size, (batch + 1) * size))] if step else []
            yield Step((batch, step), finished)


def shown(results) -> list[tuple]:
    return [(progress.name, written) for progress, written in results]


@pytest.mark.parametrize("room", [pytest.param(1, id="a batch is larger than the room"), writing.WAITING])
def test_drawing_goes_on_while_a_picture_is_written(room, monkeypatch):
    monkeypatch.setattr(writing, "WAITING", room)
    drawing_on = threading.Event()

    def told(batch, step):
        if (batch, step) == (1, 1):
            drawing_on.set()

    def write(number):
        assert number or drawing_on.wait(30)
        return number

    results = shown(write_beside(steps_of(3, told=told), write))
    assert [name for name, _ in results[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [written for _, written in results[:3]] == [[], [], []], "the first write lasts until the second batch ends"
    assert [number for _, written in results for number in written] == list(range(6))


def test_at_the_end_each_comes_as_soon_as_it_is_written():
    room = threading.Semaphore(0)
    results = write_beside(steps_of(1, size=3), lambda number: room.acquire() and number)
    assert shown([next(results), next(results)]) == [((0, 0), []), ((0, 1), [])]
    for number in range(3):
        room.release()
        again, written = next(results)
        assert (again, written) == (Step((0, 1), ()), [number]), "the step's pictures are reported once"


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
def test_what_is_written_is_handed_out_before_an_error_of_writing(wait):
    def write(number):
        if number == 5:
            raise OSError("the disk is full")
        return number

    given: list[int] = []
    with pytest.raises(OSError, match="full"):
        for _, written in write_beside(steps_of(2, size=4), write, wait=wait):
            given += written
    assert given == [0, 1, 2, 3, 4]


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


def test_drawing_waits_where_too_many_bytes_would_pile_up(monkeypatch):
    monkeypatch.setattr(writing, "WAITING", 4 * Picture(0).image.width * Picture(0).image.height * 5)
    go, given = threading.Event(), []
    with Writer() as writer:

        def give():
            for batch in range(3):
                writer.submit(lambda _: go.wait(30), [Picture(2 * batch), Picture(2 * batch + 1)])
                given.append(batch)

        thread = threading.Thread(target=give)
        thread.start()
        thread.join(0.1)
        assert given == [0, 1] and thread.is_alive()
        go.set()
        thread.join(30)
    assert given == [0, 1, 2]
