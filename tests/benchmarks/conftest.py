"""Load a benchmark script as a module, on the CPU."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from fastdiff.tuning import timing

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load():
    """load(stem) imports a script of benchmarks/. A test's changes to it end with the test."""

    def load_module(stem):
        (path,) = BENCHMARKS.rglob(f"{stem}.py")
        return importlib.import_module(".".join(path.relative_to(BENCHMARKS.parent).with_suffix("").parts))

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            del sys.modules[name]

    forget()
    yield load_module
    forget()


@pytest.fixture
def harness(load, monkeypatch):
    """benchmarks/harness/operations.py on the CPU: short measurements, no byte counts, and only dynamo's tracing."""

    def traced(function):
        torch.compiler.reset()
        return torch.compile(function, dynamic=False, fullgraph=True, backend="eager")

    measure = timing.measure
    monkeypatch.setattr(timing, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(timing, "measure", lambda calls, **options: measure(calls, graph=False, seconds=1e-4))
    operations = load("operations")
    monkeypatch.setattr(operations, "compiled", traced)
    monkeypatch.setattr(operations, "peak_bytes", lambda call: 0)
    return operations
