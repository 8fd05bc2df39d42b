"""What `only_compiling` compiles, in processes of its own: on a machine without a GPU, whose driver is a stand-in."""

import os
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host import launching
from fastdiff.kernels.host.launching import launch, only_compiling

triton = pytest.importorskip("triton", reason="no Triton here")
tl = triton.language
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver"),
]


@triton.jit
def broken(x_ptr):
    tl.static_assert(False, "this kernel is broken")


@pytest.fixture
def made(monkeypatch, tmp_path) -> Counter:
    """How many kernels this process compiled, and how many it read from Triton's files."""
    from triton.backends.compiler import GPUTarget

    counts = Counter()
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda src, metadata: (tmp_path / f"launcher of {metadata.name} {os.getpid()}").touch(),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def listener(*, cache_hit, **_):
        counts["read" if cache_hit else "compiled"] += 1

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    for kernel in vars(sys.modules["fastdiff.kernels.group_norm"]).values():
        if isinstance(kernel, triton.JITFunction):
            monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    return counts


def normalise() -> None:
    group_norm.kernel(torch.empty(2, 64, 64, 64, device="meta"), 32, eps=1e-5, activation="silu")


def test_kernels_are_read_from_what_the_processes_compiled(made, tmp_path):
    with only_compiling():
        normalise()
    assert made == {"compiled": 1, "read": 1}  # a share is this process's own
    (launcher,) = tmp_path.glob("launcher of *")
    assert launcher.name.startswith("launcher of normalise_kernel") and not launcher.name.endswith(str(os.getpid()))


def fail(*_):
    os._exit(1)


def hang(*_):
    time.sleep(600)


@pytest.mark.parametrize("compile_apart", [fail, hang])
def test_processes_that_come_to_nothing_cost_time_alone(made, monkeypatch, compile_apart):
    monkeypatch.setattr(launching, "_compile_apart", compile_apart)
    monkeypatch.setattr(launching, "PATIENCE", 0.5)
    with only_compiling():
        normalise()
    assert made == {"compiled": 2}


def test_where_no_process_can_be_forked(made, monkeypatch):
    def fork():
        raise OSError("no memory")

    monkeypatch.setattr(os, "fork", fork)
    with only_compiling():
        normalise()
    assert made == {"compiled": 2}


def test_a_kernel_that_does_not_compile_is_an_error_where_it_is_launched(made):
    def run():
        launch(broken, (1,), torch.empty(1, device="meta"), num_warps=4)

    with only_compiling():
        normalise()
        run()
    assert made == {"compiled": 1, "read": 1}
    with pytest.raises(triton.CompilationError, match="this kernel is broken"):
        run()


def test_an_error_inside_the_block_is_raised(made):
    """Triton waits for all that was submitted."""
    with pytest.raises(ZeroDivisionError), only_compiling():
        normalise()
        1 / 0  # noqa: B018
    assert made == {"compiled": 1, "read": 1}
