"""A served page, models folders and PNG files for the tests of the web page."""

import json
import os
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Gradio's own, while it is imported
    pytest.importorskip("gradio", reason="the page's tests need gradio: pip install 'fastdiff[ui]'")

from fastdiff import hub
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models
from fastdiff.ui.server import serving

EMOJI64 = hub.bundled_models()["emoji64"]


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory) -> Path:
    """cats: emoji64 without the names of its labels. plain/tiny: an unconditional model with random weights."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(EMOJI64, root / "cats", ignore=shutil.ignore_patterns("fastdiff.json"))
    _save_tiny(root / "plain" / "tiny")
    return root


def _save_tiny(folder: Path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        layers_per_block=1,
        add_attention=False,
    )
    DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=100)).save_pretrained(folder)


@pytest.fixture(scope="session")
def models(models_dir) -> Models:
    """Shared by all tests of a process, so that each model is loaded once."""
    return Models(models_dir, device="cpu")


@pytest.fixture(scope="module")
def server(models) -> str:
    """The address of a page that this module's tests share."""
    with serve(models, Limits()) as address:
        yield address


@contextmanager
def serve(models: Models, limits: Limits):
    """A page on a free port; Gradio's warnings about itself are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with serving(models, limits) as address:
            yield address.rstrip("/")


@pytest.fixture
def card_folder(tmp_path):
    """Write the JSON files of a model, as emoji64's but for what is given, and return its folder."""

    def write(name: str = "model", info: dict | None = None, **unet) -> Path:
        folder = tmp_path / name
        shutil.copytree(EMOJI64, folder, ignore=shutil.ignore_patterns("*.safetensors", "fastdiff.json"))
        config = json.loads((folder / "unet" / "config.json").read_text())
        (folder / "unet" / "config.json").write_text(json.dumps(config | unet))
        if info is not None:
            (folder / "fastdiff.json").write_text(json.dumps(info))
        return folder

    return write


@pytest.fixture
def upload_folder(tmp_path, monkeypatch) -> Path:
    """Where Gradio keeps its files, for code that runs without a server."""
    folder = tmp_path / "gradio"
    folder.mkdir()
    monkeypatch.setitem(os.environ, "GRADIO_TEMP_DIR", str(folder))
    return folder
