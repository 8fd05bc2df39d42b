"""The host runs only a few steps ahead of a GPU."""

import time

import pytest
import torch

from fastdiff.execution.pace import AHEAD, Pace


@pytest.fixture
def waited(monkeypatch):
    """The numbers of the events that were waited for, on a mocked GPU."""
    made, waited = [], []

    class Event:
        def __init__(self):
            self.number = len(made)
            made.append(self)

        def record(self, stream):
            assert stream == "the stream of cuda:1"

        def synchronize(self):
            waited.append(self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    return waited


def test_it_waits_for_the_step_that_was_queued_so_many_before(waited):
    pace = Pace(torch.device("cuda:1"))
    for step in range(AHEAD + 3):
        pace.note()
        assert waited == list(range(step - AHEAD + 1))


def test_a_cpu_has_no_queue(waited):
    pace = Pace(torch.device("cpu"))
    for _ in range(2 * AHEAD):
        pace.note()
    assert not waited


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_little_is_queued_on_a_gpu():
    a, pace = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), Pace(torch.device("cuda"))
    start = time.perf_counter()
    for _ in range(10 * AHEAD):
        for _ in range(5):
            a @ a
        pace.note()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    assert time.perf_counter() - queued < (queued - start) / 4
