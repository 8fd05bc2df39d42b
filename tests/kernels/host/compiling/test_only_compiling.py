"""Kernels compiled by `only_compiling`, in separate Python processes. A stand-in replaces the GPU's driver."""

import os
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fastdiff.kernels.device import to_fp8 as device_to_fp8
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.device.layer_norm import layer_norm_kernel
from fastdiff.kernels.host import compiling
from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.kernels.host.launching import launch
from tests.kernels.host.compiling.stand_ins import (
    KERNELS,
    broken,
    forget_kernels,
    launchers,
    narrow,
    wait_for,
    wait_until,
)

pytest.importorskip("triton", reason="no Triton here")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver"),
]


def test_workers_compile_while_the_block_runs_and_this_process_reads(made, workers, tmp_path, capfd):
    with only_compiling():
        narrow()
        wait_for(*launchers(tmp_path))
        assert made == {}
    assert made == {"read": 2} and len(workers) == 1
    assert capfd.readouterr() == ("", "")
    processes, torches = zip(*(path.read_text().split("\n") for path in launchers(tmp_path)), strict=True)
    assert [len(cached(name)) for name in KERNELS] == [1, 1]
    assert set(processes) == {str(workers[0].number)}
    assert set(torches) == {"False"}


def cached(name: str) -> list:
    """Return this process's compiled kernels of this name."""
    caches = vars(device_to_fp8)[name].device_caches.values()
    return [kernel for each in caches for kernel in each[0].values()]


def test_nothing_is_started_where_all_is_cached(made, workers, monkeypatch, tmp_path):
    with only_compiling():
        narrow()
    forget_kernels(monkeypatch)
    made.clear()
    started = len(workers)
    with only_compiling():
        narrow()
    assert made == {"read": 2} and len(workers) == started


@pytest.mark.slow
def test_the_next_block_has_workers_of_the_same_process(made, workers, monkeypatch, tmp_path):
    forges = set()
    for at, shares in enumerate((16, 32)):
        with only_compiling():
            narrow(shares)
            wait_until(lambda at=at: workers[at].was_ready)
        forges.add(compiling._forge.process.pid)
    assert len(workers) == 2 and len(forges) == 1 and workers[0].number != workers[1].number


@pytest.mark.slow
def test_the_process_has_the_environment_of_now(made, workers, monkeypatch, tmp_path):
    """For example, the folder of Triton's files: with an old one, nobody would read the workers' files."""
    with only_compiling():
        narrow()
        wait_for(*launchers(tmp_path))
    made.clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    (tmp_path / "moved").mkdir()
    with only_compiling():
        narrow(64)
        wait_for(*launchers(tmp_path / "moved")[1:])
    assert made == {"read": 1}


@pytest.mark.slow
def test_a_process_that_was_idle_for_long_ends_and_is_replaced(made, workers, monkeypatch, tmp_path):
    soon = "from fastdiff.kernels.host import compile_worker as program; program.IDLE = 0.5; program.main()"
    monkeypatch.setattr(compiling, "WORKER", f"import sys; sys.path[:] = sys.argv[1:]; {soon}")
    with only_compiling():
        narrow()
        wait_for(*launchers(tmp_path))
    wait_until(lambda: compiling._forge.process.poll() == 0)
    with only_compiling():
        narrow(64)
        wait_until(lambda: workers[1].was_ready)
    assert len(workers) == 2


@pytest.mark.parametrize("cached", [False, True], ids=["nothing-cached", "something-cached"])
def test_what_comes_before_the_first_kernel_is_made_ready_in_the_background(
    made, workers, monkeypatch, tmp_path, cached
):
    """The block waits for it. If Triton has no files yet, the workers' process is started too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    if cached:
        (tmp_path / "cache" / "kernel").mkdir(parents=True)
    go, events, threads = threading.Event(), [], threading.active_count()

    class Driver:
        @property
        def active(self):
            assert go.wait(60)
            events.append("driver")

    monkeypatch.setattr(triton.runtime, "driver", Driver())
    monkeypatch.setattr(compiling, "_readiness", None)
    compiling.get_ready()
    compiling.get_ready()
    wait_until(lambda: cached or compiling._forge is not None)
    events.append("weights")
    threading.Timer(0.1, go.set).start()
    with only_compiling():
        assert events == ["weights", "driver"] and (compiling._forge is None) == cached
    wait_until(lambda: threading.active_count() == threads)


def test_no_more_workers_than_cores_that_this_process_leaves(made, workers, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    with only_compiling():
        narrow()
    assert made == {"compiled": 2} and workers == []
    assert all(path.exists() for path in launchers(tmp_path))


READS_A_KERNEL = """
import os, socket, sys, time
from pathlib import Path
worker = socket.socket(fileno=socket.recv_fds(socket.socket(fileno=0), 1, 1)[1][0])
worker.sendall(b"%d\\n" % os.getpid())
worker.recv(1)
Path(sys.argv[1], "read").write_text("a kernel")
"""


@pytest.mark.parametrize(
    "ending", ["raise SystemExit(1)", pytest.param("time.sleep(600)", marks=pytest.mark.slow)], ids=["fails", "hangs"]
)
def test_a_worker_that_comes_to_nothing_costs_time_alone(made, workers, monkeypatch, tmp_path, ending):
    monkeypatch.setattr(compiling, "WORKER", READS_A_KERNEL + ending)
    monkeypatch.setattr(compiling, "PATIENCE", 0.5)
    with only_compiling():
        narrow()
        wait_for(tmp_path / "read")
    assert made == {"compiled": 2} and len(workers) == 1


@pytest.mark.parametrize(
    "program",
    [pytest.param("raise SystemExit(1)", marks=pytest.mark.slow), "import time; time.sleep(600)"],
    ids=["fails", "hangs"],
)
def test_a_worker_that_is_never_ready_is_not_waited_for(made, workers, monkeypatch, program):
    monkeypatch.setattr(compiling, "WORKER", program)
    monkeypatch.setattr(compiling, "PATIENCE", 600)
    with only_compiling():
        narrow()
    assert made == {"compiled": 2} and len(workers) == 1


def test_where_no_worker_can_be_started(made, monkeypatch):
    def popen(*_, **__):
        raise OSError("no memory")

    compiling._end_forge()
    monkeypatch.setattr(compiling, "Popen", popen)
    with only_compiling():
        narrow()
    assert made == {"compiled": 2}


@pytest.mark.parametrize(
    "executable", [*(pytest.param(each, marks=pytest.mark.slow) for each in (None, "")), "/opt/painter/bin/painter"]
)
def test_where_python_is_part_of_another_program(made, workers, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with only_compiling():
        narrow()
    assert made == {"compiled": 2} and workers == []


@pytest.mark.slow
def test_workers_find_the_package_where_it_is(monkeypatch, tmp_path):
    """Even if this process did not find it by `sys.path`."""
    root = str(Path(sys.modules["fastdiff"].__file__).parents[1])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != Path(root)])
    monkeypatch.chdir(tmp_path)
    forge = compiling._Forge(compiling._worker_command())
    with closing(forge), forge.fork() as worker, worker.makefile("rb") as answers:
        assert int(answers.readline()) > 0


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_an_error_where_it_is_launched(made, workers, tmp_path):
    def run():
        launch(broken, (1,), torch.empty(1, device="meta"), num_warps=4)

    with only_compiling():
        narrow()
        run()  # not a kernel of the package, so no worker gets it
        wait_for(*launchers(tmp_path))
    assert made == {"read": 2}
    with pytest.raises(triton.CompilationError, match="this kernel is broken"):
        run()


def test_a_kernel_that_no_worker_can_compile_is_an_error_where_it_is_launched(made, workers, tmp_path):
    def run():
        x, zeros = torch.empty(1, 1, 3, device="meta"), [0] * 7
        pointers = x, None, x, x, *[None] * 7
        options = {"LOOP": False, "RMS": False, "C": 3, "B1": 3, "B2": 1, "STEP": 1.0, "LEAST": 1.0}
        launch(layer_norm_kernel, (1,), *pointers, 1, 1, *zeros, 1e-6, 1e-6, **options, num_warps=4)

    with only_compiling():
        run()  # its range of 3 is not a power of two
        narrow()
        wait_for(*launchers(tmp_path))
    assert made == {"read": 2} and len(workers) == 1
    with pytest.raises(triton.CompilationError, match="power of 2"):
        run()


@pytest.mark.parametrize("error", [pytest.param(ZeroDivisionError, marks=pytest.mark.slow), KeyboardInterrupt])
def test_an_error_inside_the_block_is_raised_at_once(made, workers, monkeypatch, error):
    """Triton waits for everything submitted, so it must be told that nothing comes. The next block compiles it."""
    monkeypatch.setattr(compiling, "WORKER", "import time; time.sleep(600)")
    monkeypatch.setattr(compiling, "PATIENCE", 600)
    with pytest.raises(error), only_compiling():
        narrow()
        raise error
    assert made == {} and len(workers) == 1
    with only_compiling():
        narrow()
    assert made == {"compiled": 2}
