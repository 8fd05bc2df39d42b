"""Try malformed folders, command lines, PNGs and calls for as long as one likes, with a fresh seed each time.

    python -m tests.fuzz --minutes 30
    python -m tests.fuzz --again fuzz-failures/fuzz-abc

Cases run in worker processes. One that hangs, takes the machine's memory or ends its process is ended and reported, and
another process goes on. The folder of each failure is kept, with case.json, from which `--again` makes it anew.

Exit codes: 0 nothing was broken, 1 something was.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import re
import secrets
import shutil
import sys
import threading
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.fuzz import cases
from tests.fuzz.cases import Case
from tests.fuzz.watch import MAX_GROWTH, MAX_WAIT

ROUND = 50  # cases of a group in a row
STARTING = 180  # seconds that a worker may take to import everything
PATIENCE = MAX_WAIT + 10  # seconds for a case, which reports its own hang if it ends at all
KEPT = 3  # folders of one failure


class Findings:
    """Counts of all that was tried, and of the promises that it broke, by all workers."""

    def __init__(self, keep: Path) -> None:
        self.keep = keep
        self.tried: Counter[tuple[str, str]] = Counter()  # (group, how it ended)
        self.failures: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, group: str, ended: str, problems: list[str], case: Case, folder: Path) -> None:
        """Count a case, and keep its folder (that of the model) where it broke something."""
        with self._lock:
            self.tried[group, "failed" if problems else ended] += 1
            for problem in problems:
                kind = re.sub(r"fuzz-\w+|\d+", "#", problem)
                self.failures[kind] += 1
                if self.failures[kind] == 1:
                    print(f"{problem}\n    {case.to_json()}", flush=True)
                if self.failures[kind] <= KEPT:
                    cases.keep(folder, self.keep)

    def __str__(self) -> str:
        ends = ("done", "refused", "failed")
        rows = [f"{'':<12}" + "".join(f"{end:>10}" for end in ends)]
        for group in dict.fromkeys(group for group, _ in self.tried):
            rows.append(f"{group:<12}" + "".join(f"{self.tried[group, end]:>10}" for end in ends))
        rows += [f"{count:>6} x {problem}" for problem, count in self.failures.most_common()]
        count = sum(self.tried.values())
        return "\n".join([*rows, f"{count} cases, {self.failures.total()} promises broken"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="(default: 1)")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--group", action="append", choices=cases.GROUPS, help="may be repeated (default: all)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where failures are kept")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="make a kept case anew")
    args = parser.parse_args()
    if args.again:
        return again(args.again)
    findings, groups = Findings(args.keep), itertools.cycle(args.group or cases.GROUPS)
    end = time.monotonic() + 60 * args.minutes
    threads = [threading.Thread(target=go_on, args=(groups, end, findings)) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(findings)
    return int(bool(findings.failures))


def again(kept: Path) -> int:
    """Run one case in this process, where a debugger can see it."""
    case = Case.from_json((kept / cases.KEPT).read_text())
    with cases.made(case) as folder:
        outcome = cases.run(case, folder)
    print(f"{case}\n{outcome}")
    return int(bool(outcome.problems))


def go_on(groups: Any, end: float, findings: Findings) -> None:
    """Let one worker after the other run rounds until the time is over."""
    worker = None
    try:
        while time.monotonic() < end:
            worker = worker or Worker()
            if not worker.run_round(next(groups), end, findings):
                worker.close()
                worker = None
    finally:
        if worker:
            worker.close()


class Worker:
    """A process that runs cases, and this side of its connection."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(STARTING):
            raise SystemExit(f"a worker has not started within {STARTING} s")
        self._connection.recv()
        self._before = self._memory()

    def run_round(self, group: str, end: float, findings: Findings) -> bool:
        """Let the worker run some cases of a group; False where that ended it."""
        self._connection.send((group, secrets.randbits(32)))
        while (message := self._next()) is not None:
            case, folder = Case.from_json(message[0]), Path(message[1])
            answer = self._next()
            is_alive = not isinstance(answer, str)
            ended, problems = answer if is_alive else ("failed", [answer])
            findings.add(group, ended, problems, case, folder)
            if not is_alive:
                shutil.rmtree(folder.parents[1], ignore_errors=True)
                return False
            self._connection.send(time.monotonic() < end)
        return True

    def close(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _next(self) -> Any:
        """The worker's next message; a text says why there is none."""
        start = time.monotonic()
        while not self._connection.poll(0.1):
            if time.monotonic() - start > PATIENCE:
                return f"hung: no end after {PATIENCE} s"
            if self._memory() - self._before > 4 * MAX_GROWTH:
                return f"grew: over {4 * MAX_GROWTH >> 30} GB more"
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            return f"ended the process with code {self._process.exitcode}"

    def _memory(self) -> int:
        """Bytes that the process holds; 0 once it is gone."""
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * 4096
        return 0


def work(connection: Connection) -> None:
    """Run rounds of cases until the other side ends it: for each case its text and folder, then what came of it."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # whatever prints
    cases.prepare()
    connection.send("ready")

    while True:
        group, start = connection.recv()
        cases.explore(group, ROUND, start, _Taker(connection))
        connection.send(None)


class _Taker:
    """Runs each case, and tells the other side, until that has enough of them."""

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


if __name__ == "__main__":
    sys.exit(main())
