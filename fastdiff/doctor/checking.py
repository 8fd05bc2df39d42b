"""`fastdiff doctor --check-kernels`: each plan for sm_90 in a child process, and the verdict file."""

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
from fastdiff.kernels.host.launching import is_sm_90
from fastdiff.kernels.plans import choices, verdict
from fastdiff.runs import temporaries

COMMAND = (sys.executable, "-m", "fastdiff.doctor.judging")
LIMIT = 300.0  # seconds of a plan, which Triton compiles first
GROUP = 10  # plans that a child is given
MOST_CHILDREN = 8

Report = Callable[[str, str | None], None]  # of a plan, and why it failed, None where it passed


def find_card() -> torch.device:
    """The first card that the plans are made for. InputError where there is none, or no Triton."""
    if find_spec("triton") is None:
        raise InputError("--check-kernels: Triton is not installed; pip install triton")
    devices = (torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    found = next(filter(is_sm_90, devices), None)
    if found is None:
        raise InputError("--check-kernels: the fast kernels are for sm_90 (H100, H200), and no such card is here")
    return found


def check_kernels(device: torch.device, report: Report) -> verdict.Verdict:
    """Try all confirmed plans on the device and write the verdict file. OSError where that cannot be done.

    report: called after each plan, from one thread at a time.
    """
    plans = choices.CHOICES.plans
    failed = check_plans(sorted(plans), str(device), report)
    made = verdict.Verdict(verdict.surroundings(device), plans - failed.keys(), failed)
    write(verdict.file(), made)
    return made


def write(path: Path, made: verdict.Verdict) -> None:
    """Write the verdict file whole or not at all. OSError of one line where the disk refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporaries.holding(path.parent, (json.dumps(made.as_dict(), indent=1) + "\n").encode()) as temporary:
            os.replace(temporary, path)
    except OSError as error:
        remedy = f"make room, or name another file in {verdict.VARIABLE}"
        raise OSError(f"cannot write the verdict {path} ({error.strerror}); {remedy}") from None


def check_plans(
    plans: Sequence[str], device: str, report: Report, *, command: Sequence[str] = COMMAND, limit: float = LIMIT
) -> dict[str, str]:
    """Try plans in children, several at a time; returns the plans that failed, and why.

    limit: seconds after which a plan hangs. OSError where no child starts.
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
    """Yield each plan and why it failed. A plan that ends its child, or hangs, is followed by another child."""
    rest = list(plans)
    while rest:
        with _Child(command, {"device": device, "plans": rest}, limit) as child:
            while rest:
                answer = child.answer()
                yield rest.pop(0), answer["why"]
                if answer["last"]:
                    break


class _Child:
    """A child process, until the end of a block."""

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
        with contextlib.suppress(OSError):  # of a child that has ended already
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
        """Wait for the next line. Where none comes, the answer says why, and is the last."""
        try:
            line = self._lines.get(timeout=self._limit)
        except queue.Empty:
            return {"why": f"did not end in {self._limit:g} s", "last": True}
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
        """Say how the process ended, and the last that it said."""
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        how = f"ended its process with {'signal' if code < 0 else 'exit code'} {abs(code)}"
        return f"{how} ({last[:200]})" if last else how
