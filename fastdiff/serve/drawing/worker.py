"""The drawing of a worker process: the jobs that come through its pipe, with a drawer of its own."""

import asyncio
import os
import pickle
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tqdm import tqdm

from fastdiff.serve.drawing.engine_drawer import EngineDrawer
from fastdiff.serve.drawing.messages import (
    Ask,
    Begin,
    Begun,
    Cancel,
    Counted,
    Draw,
    Drawn,
    Ended,
    Failure,
    Loaded,
    Lost,
    Setup,
    Stop,
    packed,
)
from fastdiff.serve.orders.jobs import Job


def work(connection: Connection, device: str, setup: Setup) -> NoReturn:
    """Draw until the server stops this process, or has ended."""
    tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which would outlive a process that is killed
    asyncio.run(_Worker(connection, device, setup).work())
    raise AssertionError("a worker ends by os._exit")


class _Worker:
    """Draws jobs. Its event loop alone sends messages, and a thread receives them."""

    def __init__(self, connection: Connection, device: str, setup: Setup) -> None:
        self._connection, self._device, self._setup = connection, device, setup
        self._jobs: dict[int, Job] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._drawer: EngineDrawer | None = None

    async def work(self) -> None:
        """Receive and draw for ever."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        await asyncio.Event().wait()

    def _receive(self) -> None:
        """Receive messages until the other end of the pipe is closed: then the server has ended."""
        try:
            with suppress(EOFError, OSError):
                while not isinstance(message := pickle.loads(self._connection.recv_bytes()), Stop):
                    self._loop.call_soon_threadsafe(self._take, message)
        finally:
            _exit(0)

    def _take(self, message: Any) -> None:
        match message:
            case Begin(sizes):
                self._start(self._load(sizes))
            case Draw(task, order):
                begun = lambda _: self._loop.call_soon_threadsafe(self._send, Begun(task))  # noqa: E731
                self._jobs[task] = Job(order, begun)
                self._start(self._draw(task, self._jobs[task]))
            case Cancel(task):
                if task in self._jobs:
                    self._jobs[task].cancel()
            case Ask() if self._drawer is not None:
                self._send(Counted(self._drawer.counts()))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._running.add(task)  # the loop itself holds it weakly
        task.add_done_callback(self._running.discard)

    async def _load(self, sizes: tuple[tuple[int, int], ...]) -> None:
        try:
            drawer = EngineDrawer(self._setup.offers(self._device), self._setup.limits)
            notices = await asyncio.to_thread(drawer.load, sizes)
        except BaseException as error:
            self._lose(error)
        self._drawer = drawer
        drawer.lost.add_done_callback(lambda lost: self._loop.call_soon_threadsafe(self._lose, lost.result()))
        self._send(Loaded(notices))

    async def _draw(self, task: int, job: Job) -> None:
        """Draw a job and send its pictures, in order."""
        assert self._drawer is not None  # the server waits for `Loaded`
        failure = None
        try:
            await asyncio.to_thread(self._drawer.begin, job)
            async for made in job.pictures():
                self._send(Drawn(task, made))
        except Exception as error:
            failure = Failure.of(error)
        job.cancel()  # after an error of a file, steps are left
        del self._jobs[task]
        if not self._drawer.lost.done():  # another worker draws what this one lost
            self._send(Ended(task, failure))

    def _lose(self, error: BaseException) -> NoReturn:
        self._send(Lost(Failure.of(error)))
        _exit(1)

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # the server has ended, and `_receive` ends this process
            self._connection.send_bytes(packed(message))


def _exit(code: int) -> NoReturn:
    """End the process at once. Python's own end would wait for a step, and free the memory of a lost GPU."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
