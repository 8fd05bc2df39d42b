"""Compiles the kernels that a function launches, all side by side, before it launches them."""

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

from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.compile_worker import ANSWER, Description, Launch

DEVICE_CODE = "fastdiff.kernels.device."
GLUON_CODE = f"{DEVICE_CODE}hopper."
PATIENCE = 30.0  # seconds for the kernels that workers still compile when there is nothing else left to do
WORKER = "import sys; sys.path[:] = sys.argv[1:]; from fastdiff.kernels.host.compile_worker import main; main()"

only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)  # asked by `launch`
_compiling = RLock()  # one function at a time: its workers take all cores
_forge: "_Forge | None" = None  # of the workers of this process
_readiness: Thread | None = None  # makes ready what the first kernel needs
_once = Lock()


@contextmanager
def only_compiling() -> Iterator[None]:
    """Inside, kernels are not launched but compiled, all side by side; the block ends when they are ready.

    What a function is about to launch takes seconds this way instead of ten. What it computes is undefined. A kernel
    that does not compile is an error where it is launched. An error inside the block ends it, and the compiling, at
    once.
    """
    get_ready().join()
    compiler = _Compiler()
    with _compiling, triton.AsyncCompileMode(compiler, ignore_errors=True), closing(compiler):
        token = only_compiles.set(True)
        try:
            yield
            compiler.finish()
        finally:
            only_compiles.reset(token)


class _Job:
    """A kernel that Triton submits, or C code of its launch: `make` compiles it, or reads it where its files are there.

    A worker hears `described`; where that is None, or of a kind that cannot be pickled, it is compiled here.
    """

    def __init__(self, make: Callable, described: Description | Launch | None):
        self.future: Future = Future()
        self.make, self.pickled = make, _pickled(described)
        self.answered = Event()  # by a worker, or because none will be

    def run(self) -> None:
        if not self.future.done():
            try:
                self.future.set_result(self.make())
            except Exception as error:
                self.future.set_exception(error)
        self.answered.set()


def get_ready() -> Thread:
    """Begin, in the background, what comes before the first kernel and is not ours: half a second while weights load.

    That is Triton's driver, which it compiles, and a hash of its files; where it has compiled nothing yet also the
    process that forks workers. The thread ends when it is done, once in a process.
    """
    global _readiness
    with _once:
        if _readiness is None:
            _readiness = Thread(target=_prepare, daemon=True)
            _readiness.start()
        return _readiness


def _prepare() -> None:
    with suppress(Exception):  # it is raised where a kernel is launched
        if not any(Path(triton.knobs.cache.dir).glob("*")):
            _start_forge()
        hashing = Thread(target=triton.runtime.cache.triton_key, daemon=True)
        hashing.start()
        triton.runtime.driver.active  # noqa: B018  which makes it
        hashing.join()


@contextmanager
def _closed_on_error(end: socket.socket) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(end)
        yield
        stack.pop_all()


class _Forge:
    """A process that has Triton ready, and forks workers; see `compile_worker`."""

    def __init__(self, command: list[str]):
        self.start = command, dict(os.environ)
        self.control, theirs = socket.socketpair()
        with theirs, _closed_on_error(self.control):
            self.process = Popen(command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)

    def fork(self) -> socket.socket:
        """A worker, by its socket. OSError where the process has ended."""
        ours, theirs = socket.socketpair()
        with theirs, _closed_on_error(ours):
            socket.send_fds(self.control, [ANSWER], [theirs.fileno()])
        return ours

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


class _Worker:
    """A process that compiles, and the thread that hands it one job of a queue after another."""

    def __init__(self, worker: socket.socket, queue: "_Queue"):
        self.socket, self.queue = worker, queue
        self.was_ready = False
        self.number: int | None = None  # of the process, from when it is ready until it ends
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
        """Hand it a job; return whether the process is still there when that is done."""
        try:
            self.socket.sendall(job.pickled)
            return bool(answers.readline())
        except OSError:
            return False
        finally:
            job.answered.set()

    def close(self) -> None:
        """End the process with all that it started, and the thread, which the queue has to let go."""
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
    """Jobs in the order in which they came, but the longest first, so that all end at once: by their `Turn`."""

    def __init__(self) -> None:
        self.jobs: PriorityQueue[tuple[int, int, _Job | None]] = PriorityQueue()
        self.numbers = itertools.count()  # none twice, so that jobs are never compared

    def put(self, job: _Job, turn: Turn) -> None:
        self.jobs.put((turn, next(self.numbers), job))

    def end_one(self) -> None:
        """Have one thread that gets a job next get None."""
        self.jobs.put((Turn.END, next(self.numbers), None))

    def get(self) -> _Job | None:
        return self.jobs.get()[-1]

    def get_if_any(self) -> _Job | None:
        try:
            return self.jobs.get_nowait()[-1]
        except Empty:
            return None


class _Compiler:
    """An executor for Triton: has kernels compiled by workers, for the files that Triton keeps; then reads these.

    By threads it would take seconds: Python's part of a compilation, and more of it, holds the interpreter's lock. A
    worker that is late, fails or hangs costs time alone, as its kernels are then compiled here.
    """

    def __init__(self) -> None:
        self.jobs: list[_Job] = []
        self.queue = _Queue()  # what any worker may take, and this process in the end
        self.workers: list[_Worker] = []
        self.launches: dict[tuple, _Job] = {}  # C code by its arguments

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
        if len(self.workers) < _cores() - 1:  # one core is this process's own
            self._start_worker()

    def _start_worker(self) -> None:
        with suppress(OSError, RuntimeError):  # no memory, no process, no thread
            worker = _fork()
            if worker is not None:
                with _closed_on_error(worker):
                    self.workers.append(_Worker(worker, self.queue))

    def finish(self) -> None:
        """Compile here what no worker has taken yet, wait for the rest, and read all that they made."""
        while (job := self.queue.get_if_any()) is not None:
            job.run()
        deadline = time.monotonic() + PATIENCE
        for launch in self.launches.values():
            launch.answered.wait(max(0.0, deadline - time.monotonic()))
        for job in self.jobs:
            job.answered.wait(max(0.0, deadline - time.monotonic()))
            job.run()

    def close(self) -> None:
        """End the workers, and tell Triton that what is not made yet never will be."""
        for _ in self.workers:
            self.queue.end_one()
        for worker in self.workers:
            worker.close()
        if not all(worker.was_ready for worker in self.workers):
            _end_forge()  # which may hang
        for job in self.jobs:
            if job.future.cancel():
                job.future.set_running_or_notify_cancel()


def _fork() -> socket.socket | None:
    """A new worker, by its socket; None where there can be none. OSError where it fails."""
    with suppress(OSError):
        forge = _start_forge()
        return None if forge is None else forge.fork()
    _end_forge()  # it has ended, as it was idle for long
    forge = _start_forge()
    return None if forge is None else forge.fork()


def _start_forge() -> _Forge | None:
    """The process that forks workers; None where there can be none. It is new if there is none of this environment."""
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
    """Those that this process may use, which may be fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _description(make: Callable) -> Description | None:
    """The kernel that `make` is to compile, as a worker needs it; None where its files are there or it is not ours.

    `make` is a closure of Triton's, in which are the kernel and all that decides its code.
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
    """Nothing where there is nothing, or what has an argument of a kind that cannot be pickled."""
    try:
        return b"" if described is None else pickle.dumps(described)
    except (AttributeError, TypeError, pickle.PicklingError):
        return b""


def _is_cached(source, target, options, environment: dict[str, str]) -> bool:
    """Whether `triton.compile` would read this kernel from its files, which it finds by this key."""
    key = triton.compiler.get_cache_key(source, triton.compiler.make_backend(target), options, environment)
    files = triton.runtime.cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(files.get_group(f"{source.name[:150]}.json"))


def _worker_command() -> list[str] | None:
    """The program of workers, which imports from where this process does; None where there can be none."""
    if not Path(sys.executable or "").name.lower().startswith("python"):
        return None  # Python is part of another program, which must not be started again
    if not hasattr(os, "fork"):
        return None
    package = str(Path(sys.modules["fastdiff"].__path__[0]).parent)
    paths = [path for path in sys.path if isinstance(path, str)]
    return [sys.executable, "-S", "-c", WORKER, *([] if package in paths else [package]), *paths]
