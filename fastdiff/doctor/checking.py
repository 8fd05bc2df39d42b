"""`fastdiff doctor --check-kernels`: try each sm_90 plan in a child process, and write the verdict file."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fastdiff.errors import InputError
from fastdiff.execution import temporaries
from fastdiff.kernels.host.launching import is_sm_90
from fastdiff.kernels.plans import choices, verdict

COMMAND = (sys.executable, "-m", "fastdiff.doctor.judging")
LIMIT = 300.0  # seconds for a plan, including its compilation
GROUP = 10  # plans per child
MOST_CHILDREN = 8

Report = Callable[[str, str | None], None]  # takes a plan and why it failed, None if it passed


def find_card() -> torch.device:
    """Return the first card that the plans are made for. Raises InputError without such a card or without Triton."""
    if find_spec("triton") is None:
        raise InputError("--check-kernels: Triton is not installed; pip install triton")
    devices = (torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    found = next(filter(is_sm_90, devices), None)
    if found is None:
        raise InputError("--check-kernels: the fast kernels need an sm_90 card (H100, H200), and none was found")
    return found


def check_kernels(device: torch.device, report: Report) -> verdict.Verdict:
    """Try all plans on the device and write the verdict file.

    Raises OSError if the file cannot be written, or if no child process starts.

    Args:
        report: called after each plan, from one thread at a time.
    """
    plans = choices.CHOICES.plans
    failed = check_plans(sorted(plans), str(device), report)
    made = verdict.Verdict(verdict.surroundings(device), plans - failed.keys(), failed)
    write(verdict.file(), made)
    return made


def write(path: Path, made: verdict.Verdict) -> None:
    """Write the verdict file atomically. Raises OSError, with a one-line message, if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporaries.holding(path.parent, (json.dumps(made.as_dict(), indent=1) + "\n").encode()) as temporary:
            os.replace(temporary, path)
    except OSError as error:
        remedy = f"make room, or set {verdict.VARIABLE} to another file"
        raise OSError(f"cannot write the verdict {path} ({error.strerror}); {remedy}") from None


def check_plans(
    plans: Sequence[str], device: str, report: Report, *, command: Sequence[str] = COMMAND, limit: float = LIMIT
) -> dict[str, str]:
    """Try plans in child processes, several at a time. Return the plans that failed, and why.

    Raises OSError if no child starts.

    Args:
        limit: the seconds after which a plan counts as hung.
    """
    groups = [plans[i : i + GROUP] for i in range(0, len(plans), GROUP)]
    failed: dict[str, str] = {}
    lock = threading.Lock()

    def check_group(group: Sequence[str]) -> None:
        for plan, why in _results(group, device, command, limit):
            with lock:
                if why is not None:
                    failed[plan] = why
                report(plan, why)

    with ThreadPoolExecutor(min(MOST_CHILDREN, max(1, (os.cpu_count() or 1) // 2))) as pool:
        for done in [pool.submit(check_group, group) for group in groups]:
            done.result()
    return failed


def _results(
    plans: Sequence[str], device: str, command: Sequence[str], limit: float
) -> Iterator[tuple[str, str | None]]:
    """Yield each plan and why it failed. After a plan that hangs or ends its child, a new child tries the rest."""
    rest = list(plans)
    while rest:
        with _Child(command, {"device": device, "plans": rest}, limit) as child:
            while rest:
                answer = child.answer()
                yield rest.pop(0), answer["why"]
                if answer["last"]:
                    break


class _Child:
    """A child process that lives until the end of a block."""

    def __init__(self, command: Sequence[str], asked: Mapping[str, Any], limit: float) -> None:
        self._command, self._asked, self._limit = command, asked, limit
        self._lines: queue.Queue[str] = queue.Queue()  # "" at the end

    def __enter__(self) -> "_Child":
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, encoding="utf-8"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with contextlib.suppress(OSError):  # the child may have ended already
            self._tell(json.dumps(self._asked) + "\n")
        problem = self.answer()["why"]
        if problem is not None:
            self.__exit__()
            raise OSError(f"the process that tries the kernels did not start: it {problem}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                stream and stream.close()

    def answer(self) -> dict[str, Any]:
        """Return the child's next answer. If none comes, return a last answer that says why."""
        try:
            line = self._lines.get(timeout=self._limit)
        except queue.Empty:
            return {"why": f"did not finish in {self._limit:g} s", "last": True}
        return {"why": None, "last": False, **json.loads(line)} if line else {"why": self._end(), "last": True}

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _end(self) -> str:
        """Return how the process ended, with its last line on stderr."""
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        how = f"ended its process with {'signal' if code < 0 else 'exit code'} {abs(code)}"
        return f"{how} ({last[:200]})" if last else how
