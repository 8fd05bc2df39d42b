"""Run tests in copies of the tree, with one mutation at a time in each copy."""

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.mutation import Mutation

TIERS = ("not slow", "slow")  # expressions for pytest's -m, in order
PATIENCE = 10  # times the duration without the mutation; a longer run hangs
LEAST_PATIENCE = 60.0  # seconds
LINKED = 2**20  # bytes; files from this size are linked instead of copied, since no mutation changes weights
FORKS = str(Path(__file__).with_name("forks.py"))
SHARED = ["pytest", "numpy", "torch"]  # no plugins: pytest must import them itself, to rewrite their assertions
ARGUMENTS = ("-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider")  # for pytest
OK, FAILED, USAGE, NO_TESTS = 0, 1, 4, 5  # exit codes of pytest
HUNG = "hung"
FOREIGN = ("PYTEST_ADDOPTS", "TRITON_INTERPRET", "PYTHONPYCACHEPREFIX")  # variables to remove


@dataclass(frozen=True)
class Run:
    """A finished run of pytest: its exit code (or HUNG), the test that failed, and its seconds."""

    code: int | str
    failed: str
    seconds: float


@dataclass(frozen=True)
class Result:
    """The result of a mutation: `caught` by a test of a tier, `SURVIVED`, or `error` with the reason."""

    name: str
    outcome: str
    by: str = ""
    tier: str = ""
    seconds: float = 0.0


class Failure(Exception):
    """A mutation cannot be judged."""


class Copy:
    """A copy of the tree, in which tests run and import only the copy's fastdiff."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._tree, self._temporary, self._output = folder / "tree", folder / "tmp", folder / "output"
        self._written, self._group = 0, 0
        for name in tracked(root):
            source, target = root / name, self._tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(source, target)
        self._environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        self._environment |= {"PYTHONPATH": str(self._tree), "OMP_NUM_THREADS": "1"}
        self._check_imports()
        self._forks = subprocess.Popen(
            [sys.executable, FORKS, *SHARED],
            cwd=self._tree,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the runner
        )

    def _check_imports(self) -> None:
        """Raise Failure if tests would import another fastdiff than this copy's."""
        command = [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('fastdiff').origin)"]
        found = subprocess.run(command, cwd=self._tree, env=self._environment, capture_output=True, text=True)
        if not Path(found.stdout.strip()).is_relative_to(self._tree):
            raise Failure(f"tests in {self._tree} would import {found.stdout.strip() or found.stderr}")

    def run(self, tests: list[str], tier: str, interpreted: bool, limit: float | None = None) -> Run:
        """Run tests of a tier until one fails. Kill the run and its processes after `limit` seconds."""
        request = {
            "arguments": [*ARGUMENTS, f"--basetemp={self._temporary}", "-m", tier, *tests],
            "environment": {"TRITON_INTERPRET": "1"} if interpreted else {},
            "output": str(self._output),
        }
        start = time.monotonic()
        assert self._forks.stdin is not None
        print(json.dumps(request), file=self._forks.stdin, flush=True)
        self._group = self._answer()
        timer = threading.Timer(limit or threading.TIMEOUT_MAX, self.end)
        timer.start()
        try:
            code: int | str = self._answer()
        finally:
            timer.cancel()
        self.end()  # processes that the tests left behind
        seconds = time.monotonic() - start
        if limit is not None and seconds >= limit and code == -signal.SIGKILL:
            code = HUNG
        output = self._output.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        last = output.strip().splitlines()[-1:] or [""]
        return Run(code, failed[1] if failed else last[0], seconds)

    def _answer(self) -> int:
        assert self._forks.stdout is not None
        line = self._forks.stdout.readline()
        if not line:
            raise Failure("the process that starts tests has ended")
        return int(line)

    @contextlib.contextmanager
    def changed(self, mutation: Mutation) -> Iterator[None]:
        """Apply the mutation to the tree inside the block."""
        path = self._tree / mutation.file
        before, after = path.read_bytes(), mutation.applied_to(self._tree).encode()
        try:
            self._write(path, after)
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file with a new modification second, by which Python recognises stale bytecode."""
        path.write_bytes(content)
        self._written += 1
        os.utime(path, (self._written, self._written))
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            bytecode.unlink()

    def end(self) -> None:
        """Kill the current run and all its processes."""
        if self._group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)

    def close(self) -> None:
        """Kill all processes."""
        self._forks.kill()
        self.end()
        self._forks.communicate()


class Runner:
    """Copies of the tree, and the run of each test without a mutation."""

    def __init__(self, root: Path, jobs: int) -> None:
        self._root, self._jobs = root, jobs
        self._copies: queue.Queue[Copy] = queue.Queue()
        self._all: list[Copy] = []
        self._lock = threading.Lock()
        self._unmutated: dict[tuple[str, str, bool], Future[Run]] = {}

    def results(self, mutations: dict[str, Mutation], say: Callable[[str], None]) -> Iterator[Result]:
        """Yield the result of each mutation when it is done, after the tests have run without mutations."""
        tests = dict.fromkeys((test, m.interpreted) for m in mutations.values() for test in m.tests.split())
        with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(self._jobs) as pool:
            try:
                for i in range(self._jobs):
                    self._all.append(Copy(self._root, Path(folder).resolve() / str(i)))
                    self._copies.put(self._all[-1])
                say(f"{len(mutations)} mutations; first their tests without a mutation")
                runs = [pool.submit(self._try, test, TIERS[0], interpreted) for test, interpreted in tests]
                seconds = sum(run.result().seconds for run in runs)
                say(f"{len(tests)} files of tests took {seconds:.0f} s")
                judging = [pool.submit(self._judge, name, mutation) for name, mutation in mutations.items()]
                for future in as_completed(judging):
                    yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in self._all:
                    copy.close()

    def _try(self, test: str, tier: str, interpreted: bool) -> Run:
        with self._a_copy() as copy:
            return self._without(copy, test, tier, interpreted)

    def _judge(self, name: str, mutation: Mutation) -> Result:
        start = time.monotonic()
        with self._a_copy() as copy:
            try:
                found, tier = self._first_failure(copy, mutation)
            except (Failure, ValueError) as error:
                return Result(name, "error", str(error))
        seconds = round(time.monotonic() - start, 1)
        if found is None:
            return Result(name, "SURVIVED", seconds=seconds)
        by = f"a run that {HUNG}" if found.code == HUNG else found.failed
        return Result(name, "caught", by, tier, seconds)

    def _first_failure(self, copy: Copy, mutation: Mutation) -> tuple[Run | None, str]:
        """Run the tests with the mutation, tier by tier. Return the run that failed and its tier."""
        tried = False
        for tier in TIERS:
            plain = {test: self._without(copy, test, tier, mutation.interpreted) for test in mutation.tests.split()}
            for test, run in plain.items():
                if run.code not in (OK, NO_TESTS):
                    raise Failure(f"{test} fails without the mutation, {tier} ({run.code}): {run.failed}")
            tests = [test for test, run in plain.items() if run.code == OK]
            if not tests:
                continue
            tried = True
            limit = max(LEAST_PATIENCE, PATIENCE * sum(run.seconds for run in plain.values()))
            with copy.changed(mutation):
                run = copy.run(tests, tier, mutation.interpreted, limit)
            if run.code in (USAGE, NO_TESTS):
                raise Failure(f"pytest found no tests to run ({run.code}): {run.failed}")
            if run.code != OK:
                return run, tier
        if not tried:
            raise Failure(f"no tests in {mutation.tests}")
        return None, ""

    def _without(self, copy: Copy, test: str, tier: str, interpreted: bool) -> Run:
        """Return the run of a test without a mutation, which happens once per test and tier."""
        with self._lock:
            known = self._unmutated.get((test, tier, interpreted))
            future = self._unmutated.setdefault((test, tier, interpreted), Future())
        if known is None:
            try:
                future.set_result(copy.run([test], tier, interpreted))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    @contextlib.contextmanager
    def _a_copy(self) -> Iterator[Copy]:
        copy = self._copies.get()
        try:
            yield copy
        finally:
            self._copies.put(copy)


def tracked(root: Path) -> list[str]:
    """Return the files of the tree that git tracks or would add."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in dict.fromkeys(names) if name and os.path.lexists(root / name)]


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink() and source.is_dir() and not source.readlink().is_absolute():
        target.symlink_to(source.readlink())  # fastdiff/kernels
    elif source.is_file():
        with contextlib.suppress(OSError):  # on another file system
            if source.stat().st_size >= LINKED:
                os.link(source, target)
                return
        shutil.copy(source, target)
