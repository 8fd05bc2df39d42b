"""Worker processes that run cases. The parent notices crashes, and kills workers that hang or use too much memory."""

import contextlib
import multiprocessing
import secrets
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.fuzz import cases
from tests.fuzz.cases import Case
from tests.fuzz.watch import MAX_GROWTH, MAX_WAIT

ROUND = 50  # consecutive cases of a group
STARTING = 180  # seconds for a worker's imports
PATIENCE = MAX_WAIT + 10  # seconds per case; a slow case that ends reports itself


class Worker:
    """A process that runs cases, and this end of its connection."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(STARTING):
            raise SystemExit(f"a worker did not start within {STARTING} s")
        self._connection.recv()
        self._before = self._memory()

    def run_round(self, group: str, end: float, add: Callable[[str, list[str], Case, Path], None]) -> bool:
        """Let the worker run some cases of a group. Return False if a case ended the worker."""
        self._connection.send((group, secrets.randbits(32)))
        while (message := self._next()) is not None:
            case, folder = Case.from_json(message[0]), Path(message[1])
            answer = self._next()
            is_alive = not isinstance(answer, str)
            ended, problems = answer if is_alive else ("failed", [answer])
            add(ended, problems, case, folder)
            if not is_alive:
                shutil.rmtree(folder.parents[1], ignore_errors=True)
                return False
            self._connection.send(time.monotonic() < end)
        return True

    def close(self) -> None:
        """Kill the process, whatever it is doing."""
        self._connection.close()  # ends a worker that waits for a message
        self._process.join(5)
        self._process.kill()
        self._process.join()

    def _next(self) -> Any:
        """Return the worker's next message, or a string that says why there is none."""
        start = time.monotonic()
        while not self._connection.poll(0.1):
            if time.monotonic() - start > PATIENCE:
                return f"hung: no end after {PATIENCE} s"
            if self._memory() - self._before > 4 * MAX_GROWTH:
                return f"grew: by over {4 * MAX_GROWTH >> 30} GB"
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            return f"ended the process with code {self._process.exitcode}"

    def _memory(self) -> int:
        """Return the process's resident bytes, or 0 once it is gone."""
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * 4096
        return 0


def work(connection: Connection) -> None:
    """Run rounds of cases until the parent disconnects; send each case's text and folder, then its outcome."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # stray prints go to stderr
    for door, what in (("command", "verify"), ("library", "accelerate"), ("page", "generate")):
        cases.prepare(door, what)
    connection.send("ready")

    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has gone
        while True:
            group, start = connection.recv()
            cases.explore(group, ROUND, start, _Taker(connection))
            connection.send(None)


class _Taker:
    """Run each case and report it, until the parent has enough."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._is_on = connection, True

    def __call__(self, case: Case) -> None:
        if not self._is_on:
            return
        with cases.made(case) as folder:
            self._connection.send((case.to_json(), str(folder)))
            outcome = cases.run(case, folder)
            self._connection.send(("done" if outcome.is_done else "refused", outcome.problems))
            self._is_on = self._connection.recv()
