"""A benchmark's script as a module, on the CPU."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """load(name): a script of benchmarks/, which import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def harness(load, monkeypatch):
    """Short, on the CPU, which counts no bytes, and with dynamo's tracing but not its compiler."""
    harness = load("harness")

    def traced(function):
        torch.compiler.reset()
        return torch.compile(function, dynamic=False, fullgraph=True, backend="eager")

    measure = harness.measure
    monkeypatch.setattr(harness, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(harness, "compiled", traced)
    monkeypatch.setattr(harness, "peak_bytes", lambda call: 0)
    monkeypatch.setattr(harness, "measure", lambda calls, **options: measure(calls, graph=False, seconds=1e-4))
    return harness
