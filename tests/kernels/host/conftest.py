"""Record launches as on any card, instead of launching."""

from types import SimpleNamespace

import pytest

from fastdiff.kernels.host import launching

MULTIPROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132, 120: 170}


@pytest.fixture
def launches(monkeypatch):
    """`launches(call, capability)` returns the kernels that a call would launch on a card, each with its arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def record(call, capability):
        found = []
        monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: found.append((kernel, args, kwargs)))
        target = GPUTarget("cuda", capability, 32)  # read by device code
        monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: target))
        monkeypatch.setattr(launching, "INTERPRETER_CAPABILITY", divmod(capability, 10))
        monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", MULTIPROCESSORS[capability])
        call()
        return found

    return record
