"""A stand-in for a card's driver, and the workers that compile for it."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host import compiling
from tests.kernels.host.compiling.stand_ins import forget_kernels, is_running, wait_until

# A stand-in for the class that compiles the C code of a kernel's launch. It records the process, and whether torch is
# imported there.
LAUNCHER = """
import os, sys
from pathlib import Path

class Launcher:
    def __init__(self, src, metadata):
        lines = [str(os.getpid()), str("torch" in sys.modules)]
        with Path(os.environ["TRITON_CACHE_DIR"], f"launcher of {src.fn.__name__}").open("a") as file:
            file.write("\\n".join(lines))
"""


@pytest.fixture
def made(monkeypatch, tmp_path) -> Counter:
    """The number of kernels that this process compiled, and that it read from Triton's files."""
    from triton.backends.compiler import GPUTarget

    (tmp_path / "stand_in_launcher.py").write_text(LAUNCHER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stand_in_launcher", raising=False)
    from stand_in_launcher import Launcher

    counts = Counter()
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=Launcher,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def listener(*, cache_hit, **_):
        counts["read" if cache_hit else "compiled"] += 1

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    forget_kernels(monkeypatch)
    return counts


@pytest.fixture
def workers(monkeypatch) -> Iterator[list[compiling._Worker]]:
    """The workers that were started. At the end, they and the threads that fed them must have ended."""
    started, threads = [], threading.active_count()

    class Recorded(compiling._Worker):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self)

    monkeypatch.setattr(compiling, "_Worker", Recorded)
    monkeypatch.setattr(compiling, "PATIENCE", 250.0)  # below a test's 300 seconds; these tests are not about it
    compiling._end_forge()
    yield started
    assert all(worker.socket.fileno() == -1 for worker in started)
    assert threading.active_count() == threads
    numbers = [worker.number for worker in started if worker.number is not None]
    compiling._end_forge()
    wait_until(lambda: not any(map(is_running, numbers)))
