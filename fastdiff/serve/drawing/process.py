"""A worker process as the server sees it, and the tasks that it has."""

import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from fastdiff.serve.drawing.messages import Failure, Setup, Stop, packed
from fastdiff.serve.orders.jobs import Counts, Job

Run = Callable[[Connection, str, bytes], None]  # what a worker process runs: `entry.run`
_CONTEXT = multiprocessing.get_context("spawn")  # a fork would share CUDA's state and the locks of threads


@dataclass(eq=False)
class Task:
    """A job for a worker."""

    number: int  # grows from job to job
    job: Job
    message: bytes  # a packed `Draw`
    work: float  # millions of pixels x steps
    future: "Future[None]" = field(default_factory=Future)
    given: set[tuple[int, int | None]] = field(default_factory=set)  # place and partial of the pictures that came
    deaths: int = 0  # of workers that had it
    worker: "Process | None" = None  # that has it


class Process:
    """A worker process. Sending does not wait: a thread writes into the pipe."""

    def __init__(self, run: Run, device: str, setup: Setup) -> None:
        """Start the process. Raises OSError."""
        self._pipe, theirs = _CONTEXT.Pipe()
        arguments = (theirs, device, pickle.dumps(setup))
        self._process = _CONTEXT.Process(target=run, args=arguments, name="fastdiff-worker", daemon=True)
        try:
            self._process.start()
        finally:
            theirs.close()  # so that the worker's end closes the pipe
        self.is_loaded = False
        self.tasks: dict[int, Task] = {}
        self.counts = Counts()  # the last that it told
        self.asked = self.answered = 0  # how many times
        self.failure: Failure | None = None  # why it ends
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._write, name="worker-pipe", daemon=True).start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid or 0

    @property
    def work(self) -> float:
        """The work of its tasks."""
        return sum(task.work for task in self.tasks.values())

    def send(self, message: bytes) -> None:
        """Send a packed message. A worker that has ended gets none."""
        self._outbox.put(message)

    def messages(self) -> Iterator[Any]:
        """Yield the messages of the worker until it has ended."""
        with suppress(EOFError, OSError):
            while True:
                yield pickle.loads(self._pipe.recv_bytes())

    def stop(self) -> None:
        """Let the worker end at once. A worker that loads may not read yet, so it is killed."""
        if self.is_loaded:
            self.send(packed(Stop()))
        else:
            self.kill()

    def kill(self) -> None:
        """End the process without its help."""
        self._process.kill()

    def join(self, seconds: float) -> None:
        """Wait for the end of the process, and kill it after some seconds. For one thread alone."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._outbox.put(None)

    @property
    def end(self) -> str:
        """How the process ended, in words."""
        if self.failure is not None:
            return str(self.failure.error) or type(self.failure.error).__name__
        code = self._process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._pipe.send_bytes(message)
