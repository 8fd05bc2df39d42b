"""Models shared by all sessions: loaded once, the most recent ones kept in memory, warm before the first click."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import DeviceLostError
from fastdiff.pipelines import Pipeline
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run, draw
from fastdiff.ui.engine import MAX_LOADED, Engine
from fastdiff.ui.progress import _frame, preview
from tests.parity.z_image import tiny as captions

EMOJI64 = hub.BUNDLED / "emoji64"


def test_a_scheduler_is_made_of_the_folders_and_not_of_the_models_default(card_folder, tmp_path):
    folder = card_folder("model", info={"scheduler": "euler-karras"})
    (weights,) = (EMOJI64 / "unet").glob("*.safetensors")
    shutil.copy(weights, folder / "unet")
    engine = Engine(tmp_path, device="cpu")
    card = engine.catalogue.card("./model")
    assert engine.pipeline(card, None).scheduler.config.use_karras_sigmas
    asked = engine.pipeline(card, "euler").scheduler
    assert not asked.config.use_karras_sigmas
    assert asked.config == Pipeline.from_card(ModelCard.read("m", folder), Load.of(scheduler="euler")).scheduler.config


@pytest.mark.parametrize("name", ["emoji64", "./text/sd1"])
def test_a_model_is_warm_before_the_first_click(engine, monkeypatch, name):
    drawn = []
    monkeypatch.setattr(Engine, "pipeline", lambda *args, load=Engine.pipeline: drawn.append(load(*args)) or drawn[-1])
    engine.warm_up(name)
    assert len(drawn) == 1


def test_previews_come_from_the_preview_vae(engine, randomise, tmp_path):
    """Models whose latents it decodes get it, at full size on the page; the others preview as before."""
    width = {"encoder_block_out_channels": (8,), "decoder_block_out_channels": (8,)}
    blocks = {"num_encoder_blocks": (1,), "num_decoder_blocks": (1,)}
    theirs = randomise(diffusers.AutoencoderTiny(**width, **blocks))
    theirs.save_pretrained(tmp_path)
    own = Engine(engine.catalogue.folder, device="cpu", preview_vae=str(tmp_path))
    text, pixels = (own.pipeline(own.catalogue.card(name), None) for name in ("./text/sd1", "./plain/tiny"))
    assert text.preview_vae is own.preview_vae is not None and pixels.preview_vae is None
    step = next(iter(text.stream("a cat", height=32, width=32, num_inference_steps=1)))
    assert step.preview()[0].size == (16, 16)  # this VAE has one pixel for each latent
    with torch.no_grad():
        expected = theirs.decode(step.x0.permute(0, 3, 1, 2)).sample[0].permute(1, 2, 0)
    shown = torch.from_numpy(np.array(step.preview()[0])).float() / 127.5 - 1
    torch.testing.assert_close(shown, expected.clamp(-1, 1), rtol=0, atol=0.01)


def test_the_page_shows_previews_of_z_image(randomise, tmp_path):
    captions.pipeline(randomise, channels=16).save_pretrained(tmp_path / "z-image")
    own = Engine(tmp_path, device="cpu")
    sizes = {"height": 16, "width": 24, "num_inference_steps": 1, "guidance_scale": 0.0}
    request = Request(model="./z-image", prompt=("a cat",), seed=(5,), **sizes)
    card = own.catalogue.card("./z-image")
    run = Run.prepare(request, card, COMMAND)
    progress, *_ = draw(run, own.pipeline(card, None))
    html = preview(progress)
    assert "Preview of seed 5" in html and "data:image/png;base64," in html and "--w: 12px; --ratio: 1.5" in html


def test_a_whole_preview_is_a_jpeg_and_a_small_one_a_png():
    """A large preview is scaled down, unless a preview VAE made it."""
    images = [Image.new("RGB", (400, 300)) for _ in range(2)]
    shrunk, whole = (_frame("Preview", image, is_whole) for image, is_whole in zip(images, (False, True), strict=True))
    assert [image.size for image in images] == [(256, 192), (400, 300)]
    assert "data-small" in shrunk and "data:image/png;base64," in shrunk
    assert "data-small" not in whole and "data:image/jpeg;base64," in whole


def test_many_requests_load_a_model_once(monkeypatch):
    loads = []
    load = Pipeline.from_card
    monkeypatch.setattr(Pipeline, "from_card", lambda *args, **kw: loads.append(args) or load(*args, **kw))
    engine = Engine(device="cpu")
    card = engine.catalogue.card("emoji64")
    with ThreadPoolExecutor(4) as pool:
        pipes = list(pool.map(lambda scheduler: engine.pipeline(card, scheduler), ["ddim", "ddpm"] * 2))
    assert len(loads) == 1
    assert len({id(pipe.denoiser) for pipe in pipes}) == 1
    assert [type(pipe.scheduler).__name__ for pipe in pipes] == ["DDIMScheduler", "DDPMScheduler"] * 2


def test_the_models_used_last_stay_in_memory(engine, monkeypatch):
    loads = []
    shared = engine.pipeline(engine.catalogue.card("emoji64"), None)
    monkeypatch.setattr(Pipeline, "from_card", lambda card, load: loads.append(card.folder.name) or shared)
    own = Engine(engine.catalogue.folder, device="cpu")
    for name in ("emoji64", "./cats", "emoji64", "./plain/tiny", "emoji64", "./cats"):
        own.pipeline(own.catalogue.card(name), None)
    assert MAX_LOADED == 2
    assert loads == ["emoji64", "cats", "tiny", "cats"]


def test_a_model_of_another_precision_is_another(engine):
    card = engine.catalogue.card("./plain/tiny")
    full, eight = (engine.pipeline(card, None, precision).denoiser for precision in ("full", "int8"))
    assert eight is engine.pipeline(card, None, "int8").denoiser is not full
    assert full is engine.pipeline(card, None).denoiser


def test_warm_up_loads_the_model(engine):
    own = Engine(device="cpu")
    own.warm_up("emoji64")
    assert len(own._loaded) == 1


@pytest.mark.parametrize("error", [MemoryError("no memory"), DeviceLostError("the GPU failed")], ids=["memory", "lost"])
def test_warm_up_leaves_a_device_that_fails_to_the_first_run(engine, monkeypatch, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(Pipeline, "from_card", fail)
    own = Engine(device="cpu")
    own.warm_up("emoji64")
    with pytest.raises(type(error)):
        own.pipeline(own.catalogue.card("emoji64"), None)
