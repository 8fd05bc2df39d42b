"""Compiles the kernels that a function launches, all side by side, before it launches them."""

import hashlib
import inspect
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from queue import Empty, SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from threading import Event, RLock, Thread

from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.compile_worker import Description

DEVICE_CODE = "fastdiff.kernels.device."
PATIENCE = 30.0  # seconds for the kernels that workers still compile when there is nothing else left to do
WORKER = "import sys; sys.path[:] = sys.argv[1:]; from fastdiff.kernels.host.compile_worker import main; main()"

only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)  # asked by `launch`
_compiling = RLock()  # one function at a time: its workers take all cores


@contextmanager
def only_compiling() -> Iterator[None]:
    """Inside, kernels are not launched but compiled, all side by side; the block ends when they are ready.

    What a function is about to launch takes seconds this way instead of ten. What it computes is undefined. A kernel
    that does not compile is an error where it is launched. An error inside the block ends it, and the compiling, at
    once.
    """
    compiler = _Compiler()
    with _compiling, triton.AsyncCompileMode(compiler, ignore_errors=True), closing(compiler):
        token = only_compiles.set(True)
        try:
            yield
            compiler.finish()
        finally:
            only_compiles.reset(token)


class _Job:
    """A kernel that Triton submits: `make` compiles it, or reads it where its files are there."""

    def __init__(self, make: Callable, description: Description | None):
        self.future: Future = Future()
        self.make, self.description = make, _pickled(description)
        self.answered = Event()  # by a worker, or because none will be

    def run(self) -> None:
        if not self.future.done():
            try:
                self.future.set_result(self.make())
            except Exception as error:
                self.future.set_exception(error)
        self.answered.set()


class _Compiler:
    """An executor for Triton: has kernels compiled by workers, for the files that Triton keeps; then reads these.

    By threads it would take seconds: Python's part of a compilation, and more of it, holds the interpreter's lock. A
    worker that is late, fails or hangs costs time alone, as its kernels are then compiled here.
    """

    def __init__(self) -> None:
        self.jobs: list[_Job] = []
        self.queue: SimpleQueue[_Job | None] = SimpleQueue()  # what any worker may take, and this process in the end
        self.workers: list[tuple[Popen, Thread]] = []
        self.launches: set[tuple] = set()  # whose C code some job has compiled

    def submit(self, make: Callable) -> Future:
        description = _description(make)
        if description is not None:
            launch = description.arguments()
            description = description._replace(launcher=None) if launch in self.launches else description
            self.launches.add(launch)
        job = _Job(make, description)
        self.jobs.append(job)
        if job.description:
            self.queue.put(job)
            if len(self.workers) < (os.cpu_count() or 1) - 1:  # one core is this process's own
                self._start_worker()
        else:
            job.answered.set()
        return job.future

    def _start_worker(self) -> None:
        command = _worker_command()
        if command is None:
            return
        with suppress(OSError, RuntimeError):  # no memory, no process, no thread
            worker = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            thread = Thread(target=self._feed, args=(worker,), daemon=True)
            self.workers.append((worker, thread))
            thread.start()

    def _feed(self, worker: Popen) -> None:
        """Hand the worker one job after another, from when it is ready until it ends."""
        assert worker.stdin and worker.stdout  # pipes
        with suppress(OSError):
            alive = worker.stdout.readline()
            while alive and (job := self.queue.get()) is not None:
                try:
                    worker.stdin.write(job.description)
                    worker.stdin.flush()
                    alive = worker.stdout.readline()
                finally:
                    job.answered.set()

    def finish(self) -> None:
        """Compile here what no worker has taken yet, wait for the rest, and read all that they made."""
        with suppress(Empty):
            while (job := self.queue.get_nowait()) is not None:
                job.run()
        deadline = time.monotonic() + PATIENCE
        for job in self.jobs:
            job.answered.wait(max(0.0, deadline - time.monotonic()))
            job.run()

    def close(self) -> None:
        """End the workers, and tell Triton that what is not made yet never will be."""
        for worker, _ in self.workers:
            worker.kill()
            self.queue.put(None)
        for worker, thread in self.workers:
            if thread.is_alive():
                thread.join()
            worker.communicate()  # which closes its pipes
        for job in self.jobs:
            if job.future.cancel():
                job.future.set_running_or_notify_cancel()


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
        launcher = getattr(triton.runtime.driver.active, "launcher_cls", None)
        return Description(
            kernel.__module__, kernel.__name__, source.signature, source.constants, source.attrs, options.__dict__,
            target, launcher, triton.runtime.cache.triton_key(),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError):  # another Triton
        return None


def _pickled(description: Description | None) -> bytes:
    """Nothing where there is no description, or it has an argument of a kind that cannot be pickled."""
    try:
        return b"" if description is None else pickle.dumps(description)
    except (AttributeError, TypeError, pickle.PicklingError):
        return b""


def _is_cached(source, target, options, environment: dict[str, str]) -> bool:
    """Whether `triton.compile` would read this kernel from its files, which it finds by this key."""
    key = triton.compiler.get_cache_key(source, triton.compiler.make_backend(target), options, environment)
    files = triton.runtime.cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(files.get_group(f"{source.name[:150]}.json"))


def _worker_command() -> list[str] | None:
    """The program of a worker, which imports from where this process does; None where this program is not Python."""
    if not Path(sys.executable or "").name.lower().startswith("python"):
        return None  # Python is part of another program, which must not be started again
    package = str(Path(sys.modules["fastdiff"].__path__[0]).parent)
    paths = [path for path in sys.path if isinstance(path, str)]
    return [sys.executable, "-S", "-c", WORKER, *([] if package in paths else [package]), *paths]
