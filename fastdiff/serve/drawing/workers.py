"""The drawer whose jobs are drawn by worker processes. A worker's death loses no job: another draws the same bits."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fastdiff.execution.devices import resolve_device
from fastdiff.serve.drawing import entry
from fastdiff.serve.drawing.memory import memory_of_process
from fastdiff.serve.drawing.messages import (
    Ask,
    Begin,
    Begun,
    Cancel,
    Counted,
    Draw,
    Drawn,
    Ended,
    Loaded,
    Lost,
    Setup,
    packed,
)
from fastdiff.serve.drawing.process import Process, Run, Task
from fastdiff.serve.orders.jobs import Counts, Job, Made
from fastdiff.serve.orders.limits import work_of
from fastdiff.serve.wire.errors import FINAL, ApiError

MOST_DEATHS = 2  # of workers that had a task: then the task may be the reason
ANSWER_SECONDS = 2.0  # for the counts of a worker
END_SECONDS = 30.0  # for a worker that has closed its pipe: a driver may take long to free a GPU
log = logging.getLogger(__name__)


class Workers:
    """Gives each job to the living worker with the least work. A worker that dies gets a successor."""

    def __init__(self, setup: Setup, devices: Sequence[str], run: Run = entry.run) -> None:
        """devices: one for each worker. run: what a worker process runs; a test puts faults into it."""
        self.lost: Future[BaseException] = Future()
        self._setup, self._devices, self._run = setup, devices, run
        self._numbers, self._closed = itertools.count(), False
        self._changed = threading.Condition()  # guards what follows, and the attributes of the workers
        self.living: dict[int, Process] = {}  # by their index
        self._waiting: deque[Task] = deque()  # the oldest first
        self._keepers: list[threading.Thread] = []  # one for each index
        self._gone = Counts()  # of workers that died
        self._notices: dict[str, None] = {}  # in order

    def load(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Start the workers, and wait until each has loaded the models. Raises the error of a worker."""
        for index in range(len(self._devices)):
            keeper = threading.Thread(target=self._keep, args=(index, (*sizes,)), name=f"worker-{index}", daemon=True)
            self._keepers.append(keeper)
            keeper.start()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.lost.done() or len(self._ready()) == len(self._devices))
        if self.lost.done():
            raise self.lost.result()
        return [*self._notices]

    def begin(self, job: Job) -> None:
        """Give a job to a worker, or let it wait for one."""
        number = next(self._numbers)
        task = Task(number, job, packed(Draw(number, job.order)), work_of(job.order.run))
        task.future.add_done_callback(partial(self._cancel, task))
        job.follow(task.future)
        with self._changed:
            is_closed = self._closed
            self._waiting.append(task)
            self._distribute()
        if is_closed:
            task.future.cancel()

    def counts(self) -> Counts:
        """Return the sum of the workers' counts. A worker that does not answer in time counts as it was before."""
        with self._changed:
            asked = self._ready()
            for worker in asked:
                worker.asked += 1
                worker.send(packed(Ask()))
            wanted = [(worker, worker.asked) for worker in asked]
            self._changed.wait_for(
                lambda: all(each.answered >= count or each not in self._ready() for each, count in wanted),
                ANSWER_SECONDS,
            )
            found = replace(self._gone, memory=memory_of_process(), workers=len(self.living))
            for worker in self.living.values():
                found = found.plus(worker.counts)
            return found

    def close(self, seconds: float) -> bool:
        """End all jobs and the workers. A worker that does not end in time is killed, so this returns True."""
        with self._changed:
            self._closed = True
            workers = [*self.living.values()]
            tasks = [*self._waiting, *(task for worker in workers for task in worker.tasks.values())]
            self._changed.notify_all()
        for task in tasks:
            task.future.cancel()
        for worker in workers:
            worker.stop()
        until = time.monotonic() + seconds
        for keeper in self._keepers:
            keeper.join(max(0.0, until - time.monotonic()))
        for worker in [*self.living.values()]:
            worker.kill()
        return True

    def _keep(self, index: int, sizes: tuple[tuple[int, int], ...]) -> None:
        """Start a worker, take its messages, and go on with its successor when it has died."""
        while (worker := self._start(index, sizes)) is not None:
            for message in worker.messages():
                self._take(worker, message)
            worker.join(END_SECONDS)
            self._bury(index, worker)

    def _start(self, index: int, sizes: tuple[tuple[int, int], ...]) -> Process | None:
        """Start the worker of an index, unless the server ends."""
        if self._closed or self.lost.done():
            return None
        try:
            worker = Process(self._run, self._devices[index], self._setup)
        except OSError as error:
            self._lose(error)
            return None
        worker.send(packed(Begin(sizes)))
        with self._changed:
            self.living[index] = worker
            if self._closed:  # meanwhile
                worker.kill()
        return worker

    def _take(self, worker: Process, message: Any) -> None:
        match message:
            case Loaded(notices):
                with self._changed:
                    worker.is_loaded = True
                    self._notices |= dict.fromkeys(notices)
                    self._distribute()
                    self._changed.notify_all()
            case Begun(number):
                if number in worker.tasks:  # it may be cancelled meanwhile
                    worker.tasks[number].job.begun()
            case Drawn(number, made):
                _give(worker.tasks[number], made)
            case Ended(number, failure):
                with self._changed:
                    task = worker.tasks.pop(number)
                    self._distribute()
                _end(task, None if failure is None else failure.raised())
            case Counted(counts):
                with self._changed:
                    worker.counts, worker.answered = counts, worker.answered + 1
                    self._changed.notify_all()
            case Lost(failure):
                worker.failure = failure

    def _bury(self, index: int, worker: Process) -> None:
        """Let others draw what a dead worker had, except tasks that may have killed it."""
        with self._changed:
            del self.living[index]
            if self._closed:
                return
            tasks = [task for task in worker.tasks.values() if not task.future.cancelled()]
            for task in tasks:
                task.worker, task.deaths = None, task.deaths + 1
            doomed = [task for task in tasks if task.deaths >= MOST_DEATHS]
            again = [task for task in tasks if task.deaths < MOST_DEATHS]
            self._waiting = deque(sorted([*again, *self._waiting], key=lambda task: task.number))
            # Counters go on. The memory is free.
            self._gone = replace(self._gone.plus(worker.counts), memory={}, restarts=self._gone.restarts + 1)
            self._distribute()
            self._changed.notify_all()
        for task in doomed:
            _end(task, _too_many_deaths())
        if worker.is_loaded:
            words = "worker %d died: %s. Another one starts, and %d requests are drawn again."
            log.warning(words, index, worker.end, len(again))
        elif worker.failure is not None:
            self._lose(worker.failure.raised())
        else:
            self._lose(OSError(f"worker {index} died while it loaded the models: {worker.end}"))

    def _distribute(self) -> None:
        """Give waiting tasks to the workers with the least work. Called with the lock."""
        most = self._setup.limits.requests
        while self._waiting and (free := [each for each in self._ready() if len(each.tasks) < most]):
            task, worker = self._waiting.popleft(), min(free, key=lambda each: each.work)
            task.worker, worker.tasks[task.number] = worker, task
            worker.send(task.message)

    def _cancel(self, task: Task, future: "Future[None]") -> None:
        """Tell a worker that a task is cancelled. Its next step is not drawn, and until then the worker has it."""
        if not future.cancelled():
            return
        with self._changed:
            if task.worker is not None:
                task.worker.send(packed(Cancel(task.number)))
            else:
                with suppress(ValueError):  # it was not given to anyone yet
                    self._waiting.remove(task)

    def _ready(self) -> list[Process]:
        return [worker for _, worker in sorted(self.living.items()) if worker.is_loaded]

    def _lose(self, error: BaseException) -> None:
        """Tell that a worker cannot load the models, which ends the server."""
        with suppress(InvalidStateError):
            self.lost.set_result(error)
        with self._changed:
            self._changed.notify_all()


def choose_devices(workers: int | Literal["auto"], device: str) -> list[str]:
    """Return the device of each worker. "auto" is a worker for each GPU, or one on a CPU.

    device: as in `resolve_device`. Workers share the GPUs in turn, or use the one that has a number. Raises InputError.
    """
    chosen = resolve_device(device)
    if chosen.type == "cpu":
        return ["cpu"] * (1 if workers == "auto" else workers)
    import torch

    gpus = [*range(torch.cuda.device_count())] if chosen.index is None else [chosen.index]
    count = len(gpus) if workers == "auto" else workers
    return [f"cuda:{gpus[i % len(gpus)]}" for i in range(count)]


def _give(task: Task, made: Made) -> None:
    """Give a job a picture, unless a worker that died has given it."""
    key = made.place, made.partial
    if key not in task.given:
        task.given.add(key)
        ready: Future[Made] = Future()
        ready.set_result(made)
        task.job.add(ready)


def _end(task: Task, error: BaseException | None) -> None:
    with suppress(InvalidStateError):  # it is cancelled
        if error is None:
            task.future.set_result(None)
        else:
            task.future.set_exception(error)


def _too_many_deaths() -> ApiError:
    problem = f"{MOST_DEATHS} worker processes ended while they had this request"
    remedy = "ask for fewer pictures or a smaller size, or try again later"
    return ApiError(503, f"{problem}; {remedy}", code="workers_died", headers=FINAL)
