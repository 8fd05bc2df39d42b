"""The pipe of a worker: its device, its end, and the errors that pass."""

import os
import pickle
from concurrent.futures import CancelledError

import pytest
import torch

from fastdiff.errors import DeviceLostError, InputError, NonFiniteError
from fastdiff.execution.memory import OutOfMemoryError
from fastdiff.serve.drawing.entry import VISIBLE, choose_gpu, run
from fastdiff.serve.drawing.messages import Failure, Setup, packed
from fastdiff.serve.drawing.process import Process
from fastdiff.serve.drawing.workers import choose_devices
from fastdiff.serve.orders.limits import Limits
from tests.serve.workers.faults import errors

SETUP = Setup(("emoji-sd",), "full", None, Limits())


@pytest.mark.parametrize(
    "count, device, chosen",
    [
        ("auto", "cpu", ["cpu"]),
        (2, "cpu", ["cpu", "cpu"]),
        ("auto", "cuda", ["cuda:0", "cuda:1", "cuda:2"]),
        (4, "auto", ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]),
        (2, "cuda:1", ["cuda:1", "cuda:1"]),
        ("auto", "cuda:2", ["cuda:2"]),
    ],
)
def test_the_device_of_each_worker(monkeypatch, count, device, chosen):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_devices(count, device) == chosen


@pytest.mark.parametrize(
    "device, visible, name, seen",
    [
        ("cpu", None, "cpu", None),
        ("cuda:1", None, "cuda", "1"),
        ("cuda:1", "", "cuda", "1"),
        ("cuda:1", "4, GPU-5", "cuda", "GPU-5"),
    ],
)
def test_a_worker_sees_its_gpu_alone(monkeypatch, device, visible, name, seen):
    monkeypatch.setattr(os, "environ", {} if visible is None else {VISIBLE: visible})
    assert choose_gpu(device) == name and os.environ.get(VISIBLE) == seen


@pytest.mark.parametrize(
    "error",
    [
        InputError("a"),
        NonFiniteError("b"),
        OutOfMemoryError("c"),
        DeviceLostError("d"),
        CancelledError(),
        OSError(5, "e"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pass_as_they_are(error):
    there = pickle.loads(packed(Failure.of(error))).raised()
    assert type(there) is type(error) and str(there) == str(error)
    assert type(error).__name__ in str(there.__cause__)


def test_an_error_that_cannot_be_pickled_passes_as_one_line():
    there = Failure.of(errors()["not-picklable"]).raised()
    assert type(there) is RuntimeError and str(there).startswith("RuntimeError: ('it holds a lock', <unlocked")
    packed(there)


@pytest.mark.slow
def test_a_worker_ends_with_its_server():
    process = Process(run, "cpu", SETUP)
    process._pipe.close()  # as the kernel does when the server is killed
    process._process.join(60)
    assert process.end == "exit code 0"
    process.join(0)
