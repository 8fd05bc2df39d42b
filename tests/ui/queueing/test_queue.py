"""The queue of runs: turns of users, bounds, cancel, and runs that nobody looks at."""

import threading

import pytest

from fastdiff.errors import InputError
from fastdiff.ui.queueing import queue as module
from fastdiff.ui.queueing.queue import Job, Queue, State
from tests.support.waiting import wait_for


@pytest.fixture
def gate():
    """Lets each step of the jobs go on."""
    gate = threading.Semaphore(0)
    yield gate
    gate.release(1000)


@pytest.fixture
def queue(gate):
    queue = Queue((InputError,))
    yield queue
    gate.release(1000)
    queue.close(30)


@pytest.fixture
def add(queue, gate):
    """Add a job of some steps, each of which waits for the gate, and return the job."""
    drawn = []

    def work(name, steps, error):
        for step in range(steps):
            gate.acquire()
            drawn.append(name)
            yield (step + 1) / steps
        if error:
            raise error

    def add(owner, name="", steps=1, error=None, most=32, most_of_owner=16):
        job = Job(owner, "Draw", name, work(name, steps, error))
        queue.add(job, most, most_of_owner)
        return job

    add.drawn = drawn
    return add


def test_users_take_turns_and_the_runs_of_one_keep_their_order(queue, gate, add):
    jobs = [add("a", "a1"), add("a", "a2"), add("a", "a3"), add("b", "b1"), add("b", "b2"), add("c", "c1")]
    wait_for(lambda: jobs[0].state is State.RUNNING)
    assert [queue.before(job) for job in jobs] == [0, 3, 5, 1, 4, 2]
    gate.release(6)
    wait_for(lambda: all(job.state is State.DONE for job in jobs))
    assert add.drawn == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_user_who_queues_without_end_is_refused_and_leaves_room(queue, add):
    first = add("a")
    wait_for(lambda: first.state is State.RUNNING)
    for _ in range(3):
        add("a", most=4, most_of_owner=3)
    with pytest.raises(InputError, match="3 of your runs wait already; cancel one"):
        add("a", most=4, most_of_owner=3)
    add("b", most=4, most_of_owner=3)
    with pytest.raises(InputError, match="the queue is full: 4 runs wait"):
        add("c", most=4, most_of_owner=3)


def test_a_user_sees_and_cancels_only_own_runs(queue, add):
    mine, other = add("a"), add("b")
    wait_for(lambda: mine.state is State.RUNNING)
    assert queue.active("a") == [mine] and queue.active("b") == [other]
    assert queue.cancel("a", other.id) is None and not other.has_ended
    assert queue.cancel("b", other.id) is other and queue.active("b") == []
    assert queue.started("a", "Draw") == [mine] and queue.started("b", "Draw") == [other]


def test_cancel_answers_at_once_and_the_next_run_waits_for_the_step(queue, gate, add):
    first, second = add("a", "first", steps=5), add("a", "second")
    wait_for(lambda: first.state is State.RUNNING)
    assert queue.cancel("a", first.id) is first
    assert first.state is State.CANCELLED and queue.is_drawing and second.state is State.WAITING
    gate.release(2)
    wait_for(lambda: second.state is State.DONE)
    assert add.drawn == ["first", "second"]


def test_a_cancelled_run_that_waits_computes_nothing(queue, gate, add):
    first, waiting = add("a", "first"), add("a", "second")
    queue.cancel("a", waiting.id)
    gate.release(2)
    wait_for(lambda: first.state is State.DONE and not queue.is_drawing)
    assert add.drawn == ["first"]


def test_a_failed_run_keeps_its_error_and_the_next_one_is_drawn(queue, gate, add):
    failed, next_one = add("a", error=InputError("no")), add("a")
    gate.release(2)
    wait_for(lambda: next_one.state is State.DONE)
    assert failed.state is State.FAILED and str(failed.error) == "no"


def test_a_run_that_nobody_looks_at_ends_once_another_user_comes(queue, add, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    left = add("a")
    assert not add("a").has_ended  # a user does not displace their own runs
    newcomer = add("b")
    assert left.has_ended and not newcomer.has_ended


def test_a_queue_that_closes_cancels_all_and_draws_again_later(queue, gate, add):
    jobs = [add("a"), add("b")]
    gate.release(2)
    queue.close(30)
    assert all(job.has_ended for job in jobs)
    later = add("a")
    gate.release(1)
    wait_for(lambda: later.state is State.DONE)


@pytest.fixture
def wide_queue(gate):
    queue = Queue((InputError,), places=2, most_models=2)
    yield queue
    gate.release(1000)
    queue.close(30)


def add_to(queue, gate, owner, models=()):
    def work():
        gate.acquire()
        yield 1.0

    job = Job(owner, "Draw", owner, work(), models=frozenset(models))
    queue.add(job, 32, 16)
    return job


def test_as_many_run_at_once_as_there_are_places_and_a_user_has_one(wide_queue, gate):
    a1, a2, b, c, d = (add_to(wide_queue, gate, owner) for owner in "aabcd")
    running = [job.state is State.RUNNING for job in (a1, a2, b, c, d)]
    assert running == [True, False, True, False, False]
    assert [wide_queue.before(job) for job in (a1, a2, b, c, d)] == [0, 3, 0, 1, 2]
    gate.release(1)
    wait_for(lambda: c.state is State.RUNNING)
    assert a2.state is State.WAITING and d.state is State.WAITING
    assert wide_queue.active("a")[-1] is a2


def test_a_run_of_one_more_model_waits_and_none_overtakes_it(wide_queue, gate):
    wide_queue.places = 4
    a, b = add_to(wide_queue, gate, "a", {"one"}), add_to(wide_queue, gate, "b", {"two"})
    third, last = add_to(wide_queue, gate, "c", {"three"}), add_to(wide_queue, gate, "d", {"one"})
    assert [job.state for job in (a, b, third, last)] == [State.RUNNING] * 2 + [State.WAITING] * 2
    assert [wide_queue.before(job) for job in (third, last)] == [1, 2]
    gate.release(1)
    wait_for(lambda: third.state is State.RUNNING)
    assert last.state is (State.RUNNING if b.has_ended else State.WAITING)


def test_a_job_of_many_models_is_drawn_alone(wide_queue, gate):
    many = add_to(wide_queue, gate, "a", "xyz")
    other = add_to(wide_queue, gate, "b", "x")
    assert many.state is State.RUNNING and other.state is State.WAITING
