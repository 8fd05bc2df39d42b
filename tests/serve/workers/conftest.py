"""Fixtures for the tests of worker processes: a server with two workers, and faults for them."""

import contextlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from fastdiff.serve.drawing.messages import Setup
from fastdiff.serve.drawing.process import Process, Task
from fastdiff.serve.drawing.workers import Workers
from fastdiff.serve.keys import Keys
from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.server import serving
from fastdiff.serve.studio import Studio
from tests.serve.conftest import PATIENCE, Served
from tests.serve.workers import faults as faults_of_workers
from tests.serve.workers.faults import FOLDER, Faults, is_alive
from tests.support.waiting import TIMEOUT, wait_for


@contextlib.contextmanager
def served_by_workers(model: Path, count: int, **limits) -> Iterator[Served]:
    """Serve a model by workers while the block runs. None of them is left."""
    setup = Setup((str(model),), "full", None, Limits(**limits))
    drawer = Workers(setup, ["cpu"] * count, faults_of_workers.run)
    studio = Studio(setup.offers("cpu"), replace(setup.limits, requests=setup.limits.requests * count), Keys(), drawer)
    with serving(studio) as server, httpx.Client(base_url=server.address, timeout=PATIENCE) as http:
        studio.load()
        yield (served := Served(server, http))
        left = pids(served)
    wait_for(lambda: not any(map(is_alive, left)))


def workers_of(served: Served) -> list[Process]:
    """Return the living workers, by their index."""
    return [worker for _, worker in sorted(served.studio.drawer.living.items())]


def tasks_of(served: Served) -> list[Task]:
    """Return the tasks that the workers have."""
    return [task for worker in workers_of(served) for task in [*worker.tasks.values()]]


def pids(served: Served) -> list[int]:
    """Return the process ids of the living workers."""
    return [worker.pid for worker in workers_of(served)]


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Iterator[Faults]:
    """Faults for the workers that a module starts."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        yield Faults(folder)


@pytest.fixture(scope="module")
def served(sd1, one_thread, faults) -> Iterator[Served]:
    """A server with two workers."""
    with served_by_workers(sd1, 2) as served:
        served.studio.loaded.result(TIMEOUT)
        yield served


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def both_ready(served) -> Served:
    """The server, when both workers are there."""
    wait_for(lambda: [each.is_loaded for each in workers_of(served)] == [True, True])
    return served


def kill(pid: int) -> None:
    """Kill a worker as the kernel does when memory runs out."""
    os.kill(pid, 9)


def events_of(text: str) -> list[dict]:
    """Return the data of server-sent events."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
