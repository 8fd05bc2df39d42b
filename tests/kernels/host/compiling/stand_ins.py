"""Calls whose kernels the tests compile, and helpers that wait for the results."""

import os
import sys
import time
from pathlib import Path

import torch

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.to_fp8 import BLOCK, to_fp8
from tests.support.waiting import TIMEOUT

KERNELS = ["largest_kernel", "scale_kernel"]  # launched by `narrow`; each compiles in a tenth of a second


@triton.jit
def broken(x_ptr):
    tl.static_assert(False, "this kernel is broken")


def forget_kernels(monkeypatch) -> None:
    """Drop this process's compiled kernels, but not their files."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fastdiff.kernels.device.")]
    for kernel in [broken, *(value for module in modules for value in vars(module).values())]:
        if isinstance(kernel, triton.JITFunction):
            monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
            monkeypatch.setattr(kernel, "hash", None)
            monkeypatch.setattr(kernel, "used_global_vals", {})


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"


def wait_until(is_so) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def narrow(shares: int = 16) -> None:
    """Launch two kernels. The number of shares (16, 32 or 64) is a constant of the second."""
    to_fp8.kernel(torch.empty(2, shares, BLOCK // 64, 64, device="meta"))


def wait_for(*paths: Path) -> None:
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths))


def launchers(tmp_path) -> list[Path]:
    return [tmp_path / f"launcher of {name}" for name in KERNELS]
