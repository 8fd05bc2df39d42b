"""The real command, run in a process as by a user, or inside the test process."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdiff import cli
from fastdiff.checkpoints import hub
from tests.support.tiny import UNET, save_unet
from tests.support.waiting import TIMEOUT

BUNDLED = hub.bundled_models()["emoji64"]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment variables of the command."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}


@pytest.fixture
def fastdiff(tmp_path, environment) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `fastdiff ARGS` in tmp_path. Keyword arguments are further environment variables."""

    def run(*args: object, **variables: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "fastdiff", *map(str, args)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True, timeout=TIMEOUT
        )

    return run


@pytest.fixture
def here(tmp_path, monkeypatch, capfd) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `fastdiff ARGS` in tmp_path in this process, since a start takes seconds. Other tests start processes."""

    def run(*args: object) -> subprocess.CompletedProcess:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        code = cli.main([str(argument) for argument in args])
        return subprocess.CompletedProcess(args, code, *capfd.readouterr())

    return run


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the bundled model that a test may damage."""
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder of a guided U-Net with two labels, 8 x 8, whose steps take milliseconds."""
    folder = save_unet(tmp_path_factory.mktemp("models") / "tiny", **UNET, num_class_embeds=3)
    (folder / "fastdiff.json").write_text('{"null_label": 2, "guidance_scale": 4}')
    return folder


@pytest.fixture(scope="session")
def refused() -> Callable[..., None]:
    """Asserts that the error is one line with the input and the remedy, without a traceback."""

    def check(done: subprocess.CompletedProcess, message: str, code: int = 2) -> None:
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        *progress, line = filter(str.strip, done.stderr.splitlines())
        assert re.match(f"fastdiff: error: .*{message}", line), line
        assert all(shown.startswith("fastdiff: drawing ") for shown in progress), done.stderr

    return check


@pytest.fixture(scope="session")
def files() -> Callable[[Path], list[str]]:
    """Lists the files below a folder."""

    def names(folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    return names
