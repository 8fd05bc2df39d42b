"""A fixture for a card with an empty table folder and set times of candidates."""

from types import SimpleNamespace

import pytest
import torch

from fastdiff.kernels.plans import choices, tuning
from fastdiff.tuning import tables, timing
from tests.tuning.doubling import CPU, MILLISECONDS


@pytest.fixture
def tunes(monkeypatch, tmp_path):
    """Run kernels here, with the times MILLISECONDS. Tables are in tmp_path, for Triton 3.6.0."""
    times = dict(MILLISECONDS)
    triton = SimpleNamespace(__version__="3.6.0")
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    monkeypatch.setenv("FASTDIFF_TABLES", str(tmp_path))
    for module in (tables, tuning):
        monkeypatch.setattr(module, "triton", triton)
    monkeypatch.setattr(timing, "DEVICE", CPU)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)  # the tuner turns it off

    def measure(calls, *, seconds, graph=True):
        return {name: times[name] if name in times else times.get(eval(name), 0.1) for name in calls}

    monkeypatch.setattr(timing, "measure", measure)
    return times
