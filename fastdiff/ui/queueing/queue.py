"""The queue of runs: all users share it, users take turns, and one thread draws."""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fastdiff.errors import InputError

KEPT = 200  # ended jobs, which a page that opens again shows
PATIENCE = 600.0  # seconds: a job whose owner has not looked for so long ends once another user waits


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(eq=False)
class Job:
    """A run, or the two runs of a comparison, in the queue."""

    owner: str  # alone sees it and may cancel it
    kind: str  # the tab that shows it
    title: str
    steps: Generator[float, None, None]  # draws; yields the finished fraction after each step
    views: Sequence[Any] = ()  # what the steps have drawn so far
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: State = State.WAITING
    fraction: float = 0.0
    error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return self.state not in (State.WAITING, State.RUNNING)


class Queue:
    """Jobs belong to the server: they are drawn whether or not a page looks."""

    def __init__(self, expected: tuple[type[Exception], ...] = ()) -> None:
        """expected: errors of a run that its user can act on. Others are logged."""
        self._expected = expected
        self.device = threading.Lock()  # held by whoever computes on the device
        self._lock = threading.RLock()
        self._waiting: list[Job] = []
        self._current: Job | None = None  # also while the step of a cancelled job finishes
        self._ended: deque[Job] = deque(maxlen=KEPT)
        self._served: dict[str, float] = {}  # when the last job of an owner started
        self._seen: dict[str, float] = {}  # when an owner with jobs has last looked
        self._worker: threading.Thread | None = None

    @property
    def is_drawing(self) -> bool:
        """Whether a job is drawn, or the step of a cancelled job finishes."""
        return self._current is not None

    def add(self, job: Job, most: int, most_of_owner: int) -> None:
        """Add a job behind the other jobs of its owner. Raises InputError if too many wait, in all or of the owner."""
        with self._lock:
            self._end_abandoned(job.owner)
            if sum(each.owner == job.owner for each in self._waiting) >= most_of_owner:
                raise InputError(f"{most_of_owner} of your runs wait already; cancel one, or wait until one starts")
            if len(self._waiting) >= most:
                raise InputError(f"the queue is full: {most} runs wait; try again later")
            self._seen[job.owner] = time.monotonic()
            self._waiting.append(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="draw", daemon=True)
                self._worker.start()

    def active(self, owner: str) -> list[Job]:
        """Return the running and the waiting jobs of an owner, in the order of drawing. The owner has now looked."""
        with self._lock:
            if owner in self._seen:
                self._seen[owner] = time.monotonic()
            return [job for job in self._order() if job.owner == owner]

    def started(self, owner: str, kind: str) -> list[Job]:
        """Return the running and the ended jobs of an owner for a tab, newest first."""
        with self._lock:
            running = [job for job in self._order()[:1] if job.state is State.RUNNING]
            jobs = [*running, *reversed(self._ended)]
            return [job for job in jobs if (job.owner, job.kind) == (owner, kind)]

    def before(self, job: Job) -> int:
        """Return how many jobs are drawn before a waiting one, as far as known now."""
        with self._lock:
            order = self._order()
            return order.index(job) if job in order else 0

    def cancel(self, owner: str, name: str) -> Job | None:
        """Cancel a job of `owner`. Its current step may finish, its finished pictures stay. None if there is none."""
        with self._lock:
            for job in self._order():
                if (job.owner, job.id) == (owner, name):
                    self._end(job, State.CANCELLED)
                    return job
        return None

    def close(self, seconds: float) -> None:
        """Cancel all jobs, and wait for the current step at most `seconds`."""
        with self._lock:
            worker = self._worker
            for job in self._order():
                self._end(job, State.CANCELLED)
        if worker is not None:
            worker.join(seconds)

    def _order(self) -> list[Job]:
        """Return the jobs in the order of drawing: the owner whose last job started longest ago is next."""
        served, waiting, order = dict(self._served), list(self._waiting), []
        if self._current is not None and not self._current.has_ended:
            order.append(self._current)
        while waiting:
            job = min(waiting, key=lambda each: served.get(each.owner, 0.0))  # of equals the first
            waiting.remove(job)
            order.append(job)
            served[job.owner] = time.monotonic() + len(order)
        return order

    def _end(self, job: Job, state: State) -> None:
        with self._lock:
            if job.has_ended:
                return
            job.state = state
            self._ended.append(job)
            if job in self._waiting:
                self._waiting.remove(job)
                job.steps.close()

    def _end_abandoned(self, newcomer: str | None = None) -> None:
        """Cancel the jobs of owners who have not looked for long, if another owner waits or comes."""
        now = time.monotonic()
        with self._lock:
            owners = {job.owner for job in self._waiting} | ({newcomer} - {None})
            for job in self._order():
                if now - self._seen.get(job.owner, now) > PATIENCE and owners - {job.owner}:
                    self._end(job, State.CANCELLED)

    def _next(self) -> Job | None:
        """Begin the next job. None ends the thread."""
        with self._lock:
            self._current = None
            self._end_abandoned()
            owners = {job.owner for job in self._waiting}
            for times in (self._served, self._seen):
                for owner in times.keys() - owners:
                    del times[owner]
            if not self._waiting:
                self._worker = None
                return None
            job = self._current = self._order()[0]
            self._waiting.remove(job)
            self._served[job.owner] = time.monotonic()
            job.state = State.RUNNING
            return job

    def _work(self) -> None:
        while True:
            with self.device:
                job = self._next()
                if job is None:
                    return
                self._draw(job)

    def _draw(self, job: Job) -> None:
        try:
            with closing(job.steps) as steps:
                for job.fraction in steps:
                    self._end_abandoned()
                    if job.has_ended:
                        break
        except Exception as error:
            job.error = error
            if not isinstance(error, self._expected):
                logging.getLogger(__name__).exception("a run failed")
        finally:
            self._end(job, State.DONE if job.error is None else State.FAILED)
