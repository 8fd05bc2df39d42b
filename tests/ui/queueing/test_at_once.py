"""Runs of several users at once: they share steps, and nothing of one touches another."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdiff import cli
from fastdiff.diffusion.shared_steps import AskedStep, Company
from fastdiff.runs import drawing
from fastdiff.ui import progress
from fastdiff.ui.drawing import draw, prepare
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.progress import View
from fastdiff.ui.queueing.queue import Job, State
from fastdiff.ui.shared import models_of
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = Limits(pictures=4, steps=50, side=128)
HELD = {1: 0, 3: 2}  # the step after which a run is held, by its seed


@pytest.fixture
def companies(monkeypatch) -> list[int]:
    """How many runs have taken each step of the engine."""
    counts: list[int] = []
    take = Company.take

    def counted(company, asked, *rest):
        if isinstance(asked[0], AskedStep):  # not the decoding
            counts.append(len(asked))
        return take(company, asked, *rest)

    monkeypatch.setattr(Company, "take", counted)
    return counts


class Gate(threading.Event):
    """Holds a run, and so the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = threading.Event()


@pytest.fixture
def gates(monkeypatch) -> Iterator[dict[int, Gate]]:
    """Hold the runs of HELD until their gates are set."""
    gates, draw = {seed: Gate() for seed in HELD}, drawing.draw

    def held(run, pipe):
        seed = run.cells[0].seed
        for each in draw(run, pipe):
            if HELD.get(seed) == each.step.index:
                gates[seed].is_reached.set()
                gates[seed].wait(60)
            yield each

    monkeypatch.setattr(drawing, "draw", held)
    yield gates
    for gate in gates.values():
        gate.set()


@pytest.fixture
def add(shared, tmp_path):
    """Return a function that adds a run of an owner, and returns its job. All jobs have ended after the test."""
    jobs = []

    def add(owner: str, folder: Path | None = None, own=shared, **asked) -> Job:
        run = prepare(UncheckedRequest(**{"label": "noto birds", "num_images": 1} | asked), own, LIMITS)
        view = View()
        steps = view.follow(draw(run, own, folder or tmp_path / owner))
        jobs.append((own, Job(owner, "Draw", owner, steps, [view], models_of([run]))))
        own.queue.add(jobs[-1][1], 32, 16)
        return jobs[-1][1]

    yield add
    for own, job in jobs:
        own.queue.cancel(job.owner, job.id)
        wait_for(lambda own=own: not own.queue.is_drawing)


def the_commands(tmp_path: Path, seed: int, steps: int) -> bytes:
    out, flags = tmp_path / f"command-{seed}.png", ["--label", "noto birds", "-s", f"{seed}", "--steps", f"{steps}"]
    assert cli.main(["sample", "-m", "emoji64", *flags, "--num-images", "1", "--device", "cpu", "-o", str(out)]) == 0
    return out.read_bytes()


def picture(job: Job) -> bytes:
    assert job.state is State.DONE, job.error
    return job.views[0].drawn[0].path.read_bytes()


def test_two_users_share_steps_and_one_is_stopped(add, shared, gates, companies, tmp_path):
    jobs = [add("a", seed=1, steps=9), add("b", seed=2, steps=7), add("c", seed=3, steps=50)]
    assert [job.state for job in jobs] == [State.RUNNING] * 3
    gates[1].set()
    gates[3].is_reached.wait(60)
    shared.queue.cancel("c", jobs[2].id)
    gates[3].set()
    wait_for(lambda: not shared.queue.is_drawing)
    assert jobs[2].state is State.CANCELLED and not jobs[2].views[0].drawn
    assert max(companies) == 3 and sum(companies) == 9 + 7 + 3
    assert picture(jobs[0]) == the_commands(tmp_path, 1, 9) and picture(jobs[1]) == the_commands(tmp_path, 2, 7)


def test_a_run_that_fails_harms_no_other(add, shared, gates, monkeypatch, tmp_path):
    (tmp_path / "b").write_text("no folder")
    bar = progress.bar

    def broken(at, what=""):
        assert at.run.cells[0].seed != 3
        return bar(at, what)

    monkeypatch.setattr(progress, "bar", broken)
    jobs = [add("a", seed=1, steps=9), add("b", seed=2, steps=3), add("c", seed=3, steps=20)]
    gates[1].set()
    wait_for(lambda: not shared.queue.is_drawing)
    assert [job.state for job in jobs] == [State.DONE, State.FAILED, State.FAILED]
    assert isinstance(jobs[1].error, OSError) and isinstance(jobs[2].error, AssertionError)
    assert not any(job.stops or (job.error and job.error.__traceback__) for job in jobs), "they keep no run in memory"
    assert picture(jobs[0]) == the_commands(tmp_path, 1, 9)


def test_a_run_that_is_closed_frees_the_engine(add, shared, tmp_path):
    """Without a job, such as in a program."""
    run = prepare(UncheckedRequest(steps=20, num_images=1), shared, LIMITS)
    steps = draw(run, shared, tmp_path / "mine")
    next(steps)
    steps.close()
    job = add("a", seed=4, steps=2)
    wait_for(lambda: job.has_ended)
    assert picture(job) == the_commands(tmp_path, 4, 2)


def test_a_run_that_waits_for_the_engine_is_stopped_at_once(add, shared, gates):
    drawn, waiting = add("a", seed=1, steps=2), add("b", seed=2, steps=2)
    gates[1].is_reached.wait(60)
    shared.queue.cancel("b", waiting.id)
    following = add("b", seed=5, steps=2)
    wait_for(lambda: following.state is State.RUNNING)
    assert drawn.state is State.RUNNING, "it is held"
    gates[1].set()
    wait_for(lambda: not shared.queue.is_drawing)
    assert following.state is State.DONE


def test_waiting_for_others_does_not_count_as_time_of_a_run(add, shared, gates, monkeypatch):
    waited, watch = [], shared.budget.watch

    def seen(steps):
        for each in watch(steps):
            waited.append((each.run.cells[0].seed, each.seconds, each.waited))
            yield each

    monkeypatch.setattr(shared.budget, "watch", seen)
    jobs = [add("b", seed=3, steps=9)]
    gates[3].is_reached.wait(60)
    jobs.append(add("a", seed=1, steps=2))
    gates[3].set()
    gates[1].is_reached.wait(60)
    time.sleep(0.2)
    gates[1].set()
    wait_for(lambda: not shared.queue.is_drawing)
    assert {job.state for job in jobs} == {State.DONE}
    assert all(0 <= own <= seconds for _, seconds, own in waited)
    assert max(own for seed, _, own in waited if seed == 3) >= 0.2


def test_the_runs_of_a_user_follow_one_another(add, shared, gates):
    other, first, second = add("b", seed=1, steps=2), add("a", seed=2, steps=2), add("a", seed=5, steps=2)
    assert (first.state, second.state, other.state) == (State.RUNNING, State.WAITING, State.RUNNING)
    assert shared.queue.before(second) == 1
    gates[1].set()
    wait_for(lambda: not shared.queue.is_drawing)
    assert {job.state for job in (first, second, other)} == {State.DONE}
