"""Compile the kernels that a function launches, in parallel, before it launches them."""

import atexit
import hashlib
import inspect
import itertools
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from queue import Empty, PriorityQueue
from subprocess import DEVNULL, Popen
from threading import Event, Lock, RLock, Thread
from typing import BinaryIO

from fastdiff.kernels.host.compile_worker import ANSWER, Description, Launch
from fastdiff.kernels.host.lazy_triton import triton

DEVICE_CODE = "fastdiff.kernels.device."
GLUON_CODE = f"{DEVICE_CODE}hopper."
PATIENCE = 30.0  # seconds to wait for workers that still compile when nothing else is left to do
WORKER = "import sys; sys.path[:] = sys.argv[1:]; from fastdiff.kernels.host.compile_worker import main; main()"

only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)  # read by `launch`
_compiling = RLock()  # one function at a time: its workers use all cores
_forge: "_Forge | None" = None  # forks the workers of this process
_readiness: Thread | None = None  # prepares what the first kernel needs
_once = Lock()


@contextmanager
def only_compiling() -> Iterator["_Compiler"]:
    """Compile kernels in parallel instead of launching them inside the block, which ends when all are ready.

    Compiling a function's kernels takes seconds this way instead of ten. Results computed inside the block are
    undefined. A kernel that does not compile raises when it is launched later. An error inside the block ends the block
    and the compilation at once.
    """
    get_ready().join()
    compiler = _Compiler()
    with _compiling, triton.AsyncCompileMode(compiler, ignore_errors=True), closing(compiler):
        token = only_compiles.set(True)
        try:
            yield compiler
            compiler.finish()
        finally:
            only_compiles.reset(token)


class _Job:
    """A kernel submitted by Triton, or the C code of its launch. `make` compiles it, or reads its cached files.

    A worker gets `described`. If that is None or cannot be pickled, the job is compiled in this process.
    """

    def __init__(self, make: Callable, described: Description | Launch | None):
        self.future: Future = Future()
        self.make, self.pickled = make, _pickled(described)
        self.answered = Event()  # set by a worker, or when no worker will compile it

    def run(self) -> None:
        if not self.future.done():
            try:
                self.future.set_result(self.make())
            except Exception as error:
                self.future.set_exception(error)
        self.answered.set()


def get_ready() -> Thread:
    """Start Triton's own preparation in the background; it takes half a second, while weights load.

    Triton compiles its driver and hashes its files. If its cache is empty, the process that forks workers starts too.
    This runs once per process; the returned thread ends when it is done.
    """
    global _readiness
    with _once:
        if _readiness is None:
            _readiness = Thread(target=_prepare, daemon=True)
            _readiness.start()
        return _readiness


def _prepare() -> None:
    with suppress(Exception):  # the launch of a kernel raises it again
        if not any(Path(triton.knobs.cache.dir).glob("*")):
            _start_forge()
        hashing = Thread(target=triton.runtime.cache.triton_key, daemon=True)
        hashing.start()
        triton.runtime.driver.active  # noqa: B018  creates the driver
        hashing.join()


@contextmanager
def _closed_on_error(end: socket.socket) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(end)
        yield
        stack.pop_all()


class _Forge:
    """A process that has imported Triton and forks workers; see `compile_worker`."""

    def __init__(self, command: list[str]):
        self.start = command, dict(os.environ)
        self.control, theirs = socket.socketpair()
        with theirs, _closed_on_error(self.control):
            self.process = Popen(command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)

    def fork(self) -> socket.socket:
        """Fork a worker and return its socket. Raise OSError if the process has exited."""
        ours, theirs = socket.socketpair()
        with theirs, _closed_on_error(ours):
            socket.send_fds(self.control, [ANSWER], [theirs.fileno()])
        return ours

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


class _Worker:
    """A compiling process, and the thread that feeds it jobs from a queue."""

    def __init__(self, worker: socket.socket, queue: "_Queue"):
        self.socket, self.queue = worker, queue
        self.was_ready = False
        self.number: int | None = None  # the process id, from when it is ready until it exits
        self.thread = Thread(target=self._feed, daemon=True)
        self.thread.start()

    def _feed(self) -> None:
        with suppress(OSError, ValueError), self.socket.makefile("rb") as answers:
            self.number, self.was_ready = int(answers.readline()), True
            while (job := self.queue.get()) is not None:
                if not self._has_compiled(job, answers):
                    self.number = None
                    return

    def _has_compiled(self, job: _Job, answers: BinaryIO) -> bool:
        """Send the process a job, and return whether it is still alive when the job is done."""
        try:
            self.socket.sendall(job.pickled)
            return bool(answers.readline())
        except OSError:
            return False
        finally:
            job.answered.set()

    def close(self) -> None:
        """Kill the process and its children, and join the thread; the queue must have released it."""
        number = self.number
        if number is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(number, signal.SIGKILL)
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.socket.close()


class Turn(IntEnum):
    """The order in which free workers take jobs."""

    END = 0
    GLUON = 1  # takes twice as long as Triton
    TRITON = 2
    C = 3


class _Queue:
    """Jobs by `Turn`, longest first so that workers finish together, then by arrival."""

    def __init__(self) -> None:
        self.jobs: PriorityQueue[tuple[int, int, _Job | None]] = PriorityQueue()
        self.numbers = itertools.count()  # unique, so jobs are never compared

    def put(self, job: _Job, turn: Turn) -> None:
        self.jobs.put((turn, next(self.numbers), job))

    def end_one(self) -> None:
        """Make the next thread that asks for a job get None."""
        self.jobs.put((Turn.END, next(self.numbers), None))

    def get(self) -> _Job | None:
        return self.jobs.get()[-1]

    def get_if_any(self) -> _Job | None:
        try:
            return self.jobs.get_nowait()[-1]
        except Empty:
            return None


class _Compiler:
    """An executor for Triton: workers compile kernels into Triton's cache, and this process reads the files.

    Threads would take seconds, because much of a compilation holds the interpreter lock. A worker that is late, fails
    or hangs only costs time: its kernels are then compiled in this process.
    """

    def __init__(self) -> None:
        self.jobs: list[_Job] = []
        self.queue = _Queue()  # workers take jobs from it, and in the end this process
        self.workers: list[_Worker] = []
        self.launches: dict[tuple, _Job] = {}  # C code by its argument types

    def submit(self, make: Callable) -> Future:
        description = _description(make)
        job = _Job(make, description)
        self.jobs.append(job)
        if description is None or not job.pickled:
            job.answered.set()
            return job.future
        self._hand_out(job, Turn.GLUON if description.module.startswith(GLUON_CODE) else Turn.TRITON)
        self._submit_launch(description)
        return job.future

    def _submit_launch(self, description: Description) -> None:
        launcher, arguments = getattr(triton.runtime.driver.active, "launcher_cls", None), description.arguments()
        if launcher is None or arguments in self.launches:
            return
        launch = Launch(launcher, description)
        self.launches[arguments] = _Job(launch.compile, launch)
        self._hand_out(self.launches[arguments], Turn.C)

    def _hand_out(self, job: _Job, turn: Turn) -> None:
        self.queue.put(job, turn)
        if len(self.workers) < _cores() - 1:  # this process uses one core
            self._start_worker()

    def _start_worker(self) -> None:
        with suppress(OSError, RuntimeError):  # no memory, no process, no thread
            worker = _fork()
            if worker is not None:
                with _closed_on_error(worker):
                    self.workers.append(_Worker(worker, self.queue))

    def finish(self) -> None:
        """Compile here what no worker has taken yet, wait for the rest, and read the results."""
        while (job := self.queue.get_if_any()) is not None:
            job.run()
        deadline = time.monotonic() + PATIENCE
        for launch in self.launches.values():
            launch.answered.wait(max(0.0, deadline - time.monotonic()))
        for job in self.jobs:
            job.answered.wait(max(0.0, deadline - time.monotonic()))
            job.run()

    def failures(self) -> list[BaseException]:
        """Return the errors of the kernels that did not compile, once all have been tried."""
        errors = (job.future.exception() for job in self.jobs)
        return [error for error in errors if error is not None]

    def close(self) -> None:
        """End the workers, and cancel the jobs that are not done."""
        for _ in self.workers:
            self.queue.end_one()
        for worker in self.workers:
            worker.close()
        if not all(worker.was_ready for worker in self.workers):
            _end_forge()  # it may be hanging
        for job in self.jobs:
            if job.future.cancel():
                job.future.set_running_or_notify_cancel()


def _fork() -> socket.socket | None:
    """Fork a worker and return its socket, or None where workers are not possible. Raise OSError if it fails."""
    with suppress(OSError):
        forge = _start_forge()
        return None if forge is None else forge.fork()
    _end_forge()  # it has exited after being idle
    forge = _start_forge()
    return None if forge is None else forge.fork()


def _start_forge() -> _Forge | None:
    """Return the process that forks workers, or None where that is not possible. A new environment starts a new one."""
    global _forge
    command = _worker_command()
    if _forge is not None and _forge.start != (command, os.environ):
        _end_forge()
    if _forge is None and command is not None:
        _forge = _Forge(command)
    return _forge


@atexit.register
def _end_forge() -> None:
    global _forge
    if _forge is not None:
        _forge.close()
        _forge = None


def _cores() -> int:
    """Return the number of cores that this process may use, which may be fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _description(make: Callable) -> Description | None:
    """Describe the kernel that `make` compiles for a worker; None if it is cached or not ours.

    `make` is one of Triton's closures. It holds the kernel and everything that determines its code.
    """
    try:
        known = inspect.getclosurevars(make).nonlocals
        source, target, options, environment = (known[name] for name in ("src", "target", "options", "env_vars"))
        kernel = source.fn
        if not kernel.__module__.startswith(DEVICE_CODE) or _is_cached(source, target, options, environment):
            return None
        return Description(
            kernel.__module__, kernel.__name__, source.signature, source.constants, source.attrs, options.__dict__,
            target, triton.runtime.cache.triton_key(),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError):  # another Triton
        return None


def _pickled(described: Description | Launch | None) -> bytes:
    """Return the pickled description; empty if there is none or it cannot be pickled."""
    try:
        return b"" if described is None else pickle.dumps(described)
    except (AttributeError, TypeError, pickle.PicklingError):
        return b""


def _is_cached(source, target, options, environment: dict[str, str]) -> bool:
    """Whether `triton.compile` would find this kernel in its cache."""
    key = triton.compiler.get_cache_key(source, triton.compiler.make_backend(target), options, environment)
    files = triton.runtime.cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(files.get_group(f"{source.name[:150]}.json"))


def _worker_command() -> list[str] | None:
    """Return the workers' command line, with this process's import paths; None where workers are not possible."""
    if not Path(sys.executable or "").name.lower().startswith("python"):
        return None  # Python is embedded in another program, which must not be started again
    if not hasattr(os, "fork"):
        return None
    package = str(Path(sys.modules["fastdiff"].__path__[0]).parent)
    paths = [path for path in sys.path if isinstance(path, str)]
    return [sys.executable, "-S", "-c", WORKER, *([] if package in paths else [package]), *paths]
