"""A start picture, as an upload of the page and as a file of the command."""

import asyncio
import io
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import gradio as gr
import numpy as np
import pytest
import torch
from PIL import Image

from fastdiff import cli
from fastdiff.ui.drawing import Drawn, draw, prepare
from fastdiff.ui.parts.form import DrawForm
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.shared import Shared
from tests.parity.image_prompts.adapters import ip_adapter, save_ip_adapter
from tests.support.text_pipelines import tiny_controlnet, tiny_unet
from tests.ui.history.unserved import UnservedPage, upload

LIMITS = Limits(pictures=4, steps=50, side=128)
ASKED = {"model": "./text/sd1", "prompt": "a cat", "seed": 5, "steps": 5, "width": 64, "height": 48}


def png_file(size: tuple[int, int] = (64, 48), seed: int = 0) -> bytes:
    """Return a PNG of noise. size: (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def controlled_dir(tmp_path_factory, text_folder) -> Path:
    """A folder of text models and ControlNets: `edges`, `depth` and a file fit ./text/sd1, `wide` fits none."""
    root = tmp_path_factory.mktemp("controlled")
    for kind in ("sd1", "sdxl"):
        shutil.copytree(text_folder(kind), root / "text" / kind)
    for seed, name in enumerate(("edges", "depth")):
        tiny_controlnet("sd1", seed=seed).save_pretrained(root / "nets" / name)
    tiny_controlnet("sd1", cross_attention_dim=48).save_pretrained(root / "nets" / "wide")
    tiny_controlnet("sd1", seed=2).save_pretrained(root / "single")
    (root / "single" / "diffusion_pytorch_model.safetensors").rename(root / "single" / "lines.safetensors")
    return root


@pytest.fixture(scope="session")
def prompted_dir(tmp_path_factory, text_folder) -> Path:
    """A folder of text models, a ControlNet and IP-Adapters.

    `plain`, `plus`, and `moved`, which has no image encoder beside it, fit ./text/sd1. `xl` fits ./text/sdxl. `face`,
    `full` and `wide`, which needs another image encoder, fit none.
    """
    root = tmp_path_factory.mktemp("prompted")
    for kind in ("sd1", "sdxl"):
        shutil.copytree(text_folder(kind), root / "text" / kind)
    tiny_controlnet("sd1").save_pretrained(root / "nets" / "edges")
    plain, plus = (ip_adapter(tiny_unet("sd1"), kind) for kind in ("plain", "plus"))
    wide = plain | {"image_proj.proj.weight": torch.ones(len(plain["image_proj.proj.weight"]), 40)}
    files = {
        "ip/plain": plain,
        "ip/plus": plus,
        "ip/face": plain | {"ip_adapter.0.to_q_lora.down.weight": torch.ones(2, 2)},
        "ip/full": {"image_proj.proj.3.weight": torch.ones(2), "ip_adapter.1.to_k_ip.weight": torch.ones(2, 2)},
        "ip/wide": wide,
        "other/moved": ip_adapter(tiny_unet("sd1"), "plain", 1),
        "other/xl": ip_adapter(tiny_unet("sdxl")),
    }
    for name, tensors in files.items():
        save_ip_adapter(root / os.path.dirname(name), tensors, f"{os.path.basename(name)}.safetensors")
    shutil.rmtree(root / "other" / "image_encoder")
    return root


@pytest.fixture
def apple(upload_folder) -> dict:
    """An uploaded picture, as Gradio's FileData."""
    return upload(png_file(), "apple.png")


@pytest.fixture
def page(unserved_page, models_dir) -> UnservedPage:
    return unserved_page(models_dir)


@pytest.fixture
def form(catalogue) -> DrawForm:
    """The form of Draw for ./text/sd1."""

    async def inside() -> DrawForm:  # without an event loop, Gradio creates some and closes none
        with gr.Blocks():
            return DrawForm.build(catalogue, catalogue.card("./text/sd1"), Limits())

    return asyncio.run(inside())


@pytest.fixture
def picture(shared, tmp_path) -> Callable[..., Drawn]:
    """Return a function that draws one picture on the page."""
    count = iter(range(100))

    def draw_one(own: Shared = shared, **asked) -> Drawn:
        run = prepare(UncheckedRequest(**ASKED | asked), own, LIMITS)
        (drawn,) = [each for _, some in draw(run, own, tmp_path / f"page{next(count)}") for each in some]
        return drawn

    return draw_one


@pytest.fixture
def command(models_dir, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Return a function that draws the same picture with the command, in a folder with apple.png."""

    def sample(*flags: str, prompt: str = "a cat", files: Mapping[str, bytes] = MappingProxyType({})) -> Path:
        here = tmp_path / "here"
        here.mkdir()
        for name, data in {"apple.png": png_file(), **files}.items():
            (here / name).write_bytes(data)
        for folder in models_dir.iterdir():
            (here / folder.name).symlink_to(folder)
        monkeypatch.chdir(here)
        monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
        own = ["--prompt", prompt, "-s", "5", "--steps", "5", "--width", "64", "--height", "48", "--num-images", "1"]
        assert cli.main(["sample", "-m", "./text/sd1", *own, "--device", "cpu", *flags, "-o", "command.png"]) == 0
        return here / "command.png"

    return sample
