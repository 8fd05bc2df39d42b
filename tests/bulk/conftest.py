"""A tiny model with random weights, its plans, and workers in this process."""

import hashlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from fastdiff.bulk.fingerprint import take_fingerprint
from fastdiff.bulk.folder import Folder, Record
from fastdiff.bulk.plan import Plan
from fastdiff.bulk.stopping import Stop
from fastdiff.bulk.worker import Worker
from fastdiff.checkpoints.model_hash import begin_files_hash
from fastdiff.cli import main
from fastdiff.pipelines import load_pipeline
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model
from tests.support.tiny import UNET, save_unet
from tests.support.waiting import TIMEOUT

# One level, as these tests draw hundreds of pictures.
SMALL = UNET | {"block_out_channels": (8,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The folder of a U-Net without labels, 8 x 8."""
    return save_unet(tmp_path_factory.mktemp("models") / "tiny", **SMALL)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory) -> Path:
    """The folder of a U-Net with three classes, 8 x 8."""
    return save_unet(tmp_path_factory.mktemp("models") / "labelled", **SMALL, num_class_embeds=3)


@pytest.fixture
def make_plan(model):
    """Makes plans, by default of 20 pictures in shards of 6."""

    def make(folder: Path = model, *, format="png", shard_size=6, batch_size=4, spec=None, **request) -> Plan:
        asked = {"model": str(folder), "num_inference_steps": 2, "num_images": 20, "dtype": "float32"} | request
        request = Request(**asked)
        sizes = {"shard_size": shard_size, "batch_size": batch_size}
        return Plan.make(request, find_model(request), spec=spec, format=format, **sizes)

    return make


@pytest.fixture(scope="session")
def pipes():
    """The pipeline and the fingerprint of each plan's model, loaded once."""
    loaded = {}

    def load(plan: Plan):
        card, request = plan.run.card, plan.run.request
        key = card.folder, request.control, request.ip_adapter
        if key not in loaded:
            pipe = load_pipeline(card, request, "cpu")
            loaded[key] = pipe, take_fingerprint(pipe, begin_files_hash(card, None).result())
        return loaded[key]

    return load


@pytest.fixture
def worker(pipes, tmp_path):
    """Makes a worker of a plan in this process, with an open folder."""

    def make(plan: Plan, out: Path = tmp_path / "out", **options) -> Worker:
        pipe, fingerprint = pipes(plan)
        folder = Folder(out, plan.format)
        folder.open(plan, options.pop("fingerprint", fingerprint), **options)
        return Worker(plan, folder, pipe, fingerprint, Stop())

    return make


@pytest.fixture(scope="session")
def digests():
    """Returns the SHA-256 of the pixels of every PNG below a folder, by path, and asserts that no two are equal."""

    def read(folder: Path) -> dict[str, str]:
        found = {}
        for path in sorted(folder.rglob("*.png")):
            with Image.open(path) as image:
                found[path.relative_to(folder).as_posix()] = hashlib.sha256(image.tobytes()).hexdigest()
        assert len(set(found.values())) == len(found), "two pictures are equal"
        return found

    return read


@pytest.fixture(scope="session")
def records():
    """Returns the hashes in the JSON files of a run's shards."""

    def read(folder: Path) -> dict[str, tuple[str, str]]:
        found = {path.stem: Record.read(path) for path in sorted((folder / "shards").glob("??????.json"))}
        return {name: (record.sha256, record.pixels_sha256) for name, record in found.items()}

    return read


@pytest.fixture
def arguments(model) -> list[str]:
    """The `fastdiff` arguments for the plan of make_plan."""
    flags = ["--steps", "2", "--num-images", "20", "--dtype", "float32", "--shard-size", "6", "--batch-size", "4"]
    return ["bulk", "-m", str(model), *flags, "--device", "cpu", "--out", "out"]


@pytest.fixture
def here(monkeypatch):
    """Makes the command run a single worker in this process. Returns the LaunchConfigs passed to torchrun."""
    asked = []

    def launch(config, program):
        def run(*command: str) -> None:
            with monkeypatch.context() as worker:
                for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"):
                    worker.setenv(name, "0")
                worker.setenv("LOCAL_WORLD_SIZE", "1")
                worker.setattr(Stop, "install", lambda stop: None)
                assert main(command[command.index("bulk") :]) == 0

        asked.append(config)
        return run

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    level = logging.getLogger("fastdiff").level
    yield asked
    logging.getLogger("fastdiff").setLevel(level)


@pytest.fixture
def start(tmp_path):
    """Starts `python -m ...` in tmp_path, and terminates processes that still run after the test."""
    started = []

    def start(*arguments: object) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        with process:  # closes its pipes
            process.wait(timeout=TIMEOUT)
