"""The queue of runs: users take turns, and runs of several users are drawn at once, each in a thread of its own."""

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import closing
from contextvars import ContextVar
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
    models: frozenset[Hashable] = frozenset()  # that it draws with
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: State = State.WAITING
    fraction: float = 0.0
    error: Exception | None = None
    stops: list[Callable[[], object]] = field(default_factory=list)  # called once it has ended

    @property
    def has_ended(self) -> bool:
        return self.state not in (State.WAITING, State.RUNNING)


_current: ContextVar[Job | None] = ContextVar("job", default=None)  # of the thread


def when_ended(stop: Callable[[], object]) -> None:
    """Call `stop` once the job of this thread has ended or was cancelled. It may be called twice, by any thread."""
    job = _current.get()
    if job is not None:
        job.stops.append(stop)
        if job.has_ended:
            stop()


class Queue:
    """Jobs belong to the server: they are drawn whether or not a page looks.

    The jobs of one owner are drawn one after another. Jobs of several owners are drawn at once, and the owner whose
    last job started longest ago is next.
    """

    def __init__(self, expected: tuple[type[Exception], ...] = (), places: int = 1, most_models: int = 2) -> None:
        """expected: errors of a run that its user can act on. Others are logged.

        places: how many jobs are drawn at once. most_models: how many models these draw with; a job with more of them
        is drawn alone.
        """
        self._expected, self.places, self._most_models = expected, places, most_models
        self._lock = threading.RLock()
        self._waiting: list[Job] = []
        self._running: dict[Job, threading.Thread] = {}  # also while the step of a cancelled job finishes
        self._ended: deque[Job] = deque(maxlen=KEPT)
        self._served: dict[str, float] = {}  # when the last job of an owner started
        self._seen: dict[str, float] = {}  # when an owner with jobs has last looked

    @property
    def is_drawing(self) -> bool:
        """Whether a job is drawn, or the step of a cancelled job finishes."""
        return bool(self._running)

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
            self._begin()

    def active(self, owner: str) -> list[Job]:
        """Return the running and the waiting jobs of an owner, in the order of drawing. The owner has now looked."""
        with self._lock:
            if owner in self._seen:
                self._seen[owner] = time.monotonic()
            return [job for job in self._jobs() if job.owner == owner]

    def started(self, owner: str, kind: str) -> list[Job]:
        """Return the running and the ended jobs of an owner for a tab, newest first."""
        with self._lock:
            running = [job for job in self._jobs() if job.state is State.RUNNING]
            jobs = [*running, *reversed(self._ended)]
            return [job for job in jobs if (job.owner, job.kind) == (owner, kind)]

    def before(self, job: Job) -> int:
        """Return how many jobs end before a waiting one begins, as far as known now.

        It assumes that the owner's own job ends first, and then the job that started first.
        """
        with self._lock:
            running, waiting = [each for each in self._running if not each.has_ended], list(self._waiting)
            served, now, ended = dict(self._served), time.monotonic(), 0
            while job in waiting:
                following = self._following(waiting, running, served)
                if following is None:
                    running.remove(next((each for each in running if each.owner == job.owner), running[0]))
                    ended += 1
                else:
                    waiting.remove(following)
                    running.append(following)
                    served[following.owner] = now = math.nextafter(now, math.inf)
            return ended

    def cancel(self, owner: str, name: str) -> Job | None:
        """Cancel a job of `owner`. Its current step may finish, its finished pictures stay. None if there is none."""
        with self._lock:
            for job in self._jobs():
                if (job.owner, job.id) == (owner, name):
                    self._end(job, State.CANCELLED)
                    return job
        return None

    def close(self, seconds: float) -> None:
        """Cancel all jobs, and wait for their current steps at most `seconds` in all."""
        until = time.monotonic() + seconds
        with self._lock:
            threads = [*self._running.values()]
            for job in self._jobs():
                self._end(job, State.CANCELLED)
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _jobs(self) -> list[Job]:
        """Return the running and the waiting jobs. The jobs of an owner are in the order of drawing."""
        return [*(job for job in self._running if not job.has_ended), *self._waiting]

    def _following(self, waiting: Sequence[Job], running: Sequence[Job], served: Mapping[str, float]) -> Job | None:
        """Return the job that begins next beside the running ones, or None if one of these must end first."""
        owners = {job.owner for job in running}
        free = [job for job in waiting if job.owner not in owners]
        if not free or len(running) >= self.places:
            return None
        job = min(free, key=lambda each: served.get(each.owner, 0.0))  # of equals the first
        models = job.models.union(*(each.models for each in running))
        return job if not running or len(models) <= self._most_models else None

    def _end(self, job: Job, state: State) -> None:
        with self._lock:
            if job.has_ended:
                return
            job.state = state
            self._ended.append(job)
            if job in self._waiting:
                self._waiting.remove(job)
                job.steps.close()
            for stop in job.stops:
                stop()

    def _end_abandoned(self, newcomer: str | None = None) -> None:
        """Cancel the jobs of owners who have not looked for long, if another owner waits or comes."""
        now = time.monotonic()
        with self._lock:
            owners = {job.owner for job in self._waiting} | ({newcomer} - {None})
            for job in self._jobs():
                if now - self._seen.get(job.owner, now) > PATIENCE and owners - {job.owner}:
                    self._end(job, State.CANCELLED)

    def _begin(self) -> None:
        """Begin the waiting jobs that may be drawn beside the running ones, each in a thread."""
        with self._lock:
            self._end_abandoned()
            owners = {job.owner for job in (*self._waiting, *self._running)}
            for times in (self._served, self._seen):
                for owner in times.keys() - owners:
                    del times[owner]
            while (job := self._following(self._waiting, [*self._running], self._served)) is not None:
                self._waiting.remove(job)
                self._served[job.owner] = time.monotonic()
                job.state = State.RUNNING
                self._running[job] = threading.Thread(target=self._draw, args=(job,), name="draw", daemon=True)
                self._running[job].start()

    def _draw(self, job: Job) -> None:
        _current.set(job)
        try:
            with closing(job.steps) as steps:
                for job.fraction in steps:
                    self._end_abandoned()
                    if job.has_ended:
                        break
        except Exception as error:
            if not isinstance(error, self._expected):
                logging.getLogger(__name__).exception("a run failed")
            job.error = error.with_traceback(None)  # which would keep what it drew with in memory
        finally:
            with self._lock:
                self._end(job, State.DONE if job.error is None else State.FAILED)
                job.stops.clear()  # they keep the run in memory
                del self._running[job]
                self._begin()
