"""Find and kill the processes of a bulk run."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.waiting import TIMEOUT


def children(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if int(parent) == pid and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def kill(pid: int) -> None:
    """Kill a process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_all(launcher: subprocess.Popen) -> None:
    """Kill a launcher and all its workers at once."""
    for pid in [*children(launcher.pid), launcher.pid]:
        kill(pid)
    launcher.wait()


def wait_for(condition: Callable[[], object], launcher: subprocess.Popen, seconds: float = TIMEOUT) -> None:
    """Wait until a condition holds while the launcher runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None, launcher.communicate()[1]
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
