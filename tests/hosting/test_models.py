"""Models that all requests share: loaded once, the most recent ones kept in memory, warm before the first click."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import diffusers
import numpy as np
import pytest
import torch

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import DeviceLostError
from fastdiff.hosting.models import MAX_LOADED, Models
from fastdiff.pipelines import Pipeline
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run

EMOJI64 = hub.BUNDLED / "emoji64"


def test_a_scheduler_is_made_of_the_folders_and_not_of_the_models_default(card_folder, tmp_path):
    folder = card_folder("model", info={"scheduler": "euler-karras"})
    (weights,) = (EMOJI64 / "unet").glob("*.safetensors")
    shutil.copy(weights, folder / "unet")
    models = Models(tmp_path, device="cpu")
    card = models.catalogue.card("./model")
    assert models.pipeline(card, None).scheduler.config.use_karras_sigmas
    asked = models.pipeline(card, "euler").scheduler
    assert not asked.config.use_karras_sigmas
    assert asked.config == Pipeline.from_card(ModelCard.read("m", folder), Load.of(scheduler="euler")).scheduler.config


def test_the_scheduler_of_a_card_is_read_once_and_each_request_has_a_copy(monkeypatch):
    read, cards = ModelCard.read_scheduler, []
    monkeypatch.setattr(ModelCard, "read_scheduler", lambda card: cards.append(card) or read(card))
    models, one = Models(device="cpu"), ModelCard.read("emoji64", EMOJI64)
    models.pipeline(one, None)
    cards.clear()
    first, second = (models.pipeline(one, "ddpm").scheduler for _ in range(2))
    first.set_timesteps(3)
    assert second.num_inference_steps is None and second.config == first.config and len(cards) == 1
    other = ModelCard.read("emoji64", EMOJI64)  # its files may have changed since
    models.pipeline(other, "ddpm")
    assert cards[1] is other


@pytest.mark.parametrize("name", ["emoji64", "./text/sd1"])
def test_a_model_is_warm_before_the_first_click(models, monkeypatch, name):
    drawn = []
    monkeypatch.setattr(Models, "pipeline", lambda *args, load=Models.pipeline: drawn.append(load(*args)) or drawn[-1])
    models.warm_up(name)
    assert len(drawn) == 1


def test_previews_come_from_the_preview_vae(models, randomise, tmp_path):
    """Models whose latents it decodes get it, at full size on the page; the others preview as before."""
    width = {"encoder_block_out_channels": (8,), "decoder_block_out_channels": (8,)}
    blocks = {"num_encoder_blocks": (1,), "num_decoder_blocks": (1,)}
    theirs = randomise(diffusers.AutoencoderTiny(**width, **blocks))
    theirs.save_pretrained(tmp_path)
    own = Models(models.catalogue.folder, device="cpu", preview_vae=str(tmp_path))
    text, pixels = (own.pipeline(own.catalogue.card(name), None) for name in ("./text/sd1", "./plain/tiny"))
    assert text.preview_vae is own.preview_vae is not None and pixels.preview_vae is None
    step = next(iter(text.stream("a cat", height=32, width=32, num_inference_steps=1)))
    assert step.preview()[0].size == (16, 16)  # this VAE has one pixel for each latent
    with torch.no_grad():
        expected = theirs.decode(step.x0.permute(0, 3, 1, 2)).sample[0].permute(1, 2, 0)
    shown = torch.from_numpy(np.array(step.preview()[0])).float() / 127.5 - 1
    torch.testing.assert_close(shown, expected.clamp(-1, 1), rtol=0, atol=0.01)


def test_many_requests_load_a_model_once(monkeypatch):
    loads = []
    load = Pipeline.from_card
    monkeypatch.setattr(Pipeline, "from_card", lambda *args, **kw: loads.append(args) or load(*args, **kw))
    models = Models(device="cpu")
    card = models.catalogue.card("emoji64")
    with ThreadPoolExecutor(4) as pool:
        pipes = list(pool.map(lambda scheduler: models.pipeline(card, scheduler), ["ddim", "ddpm"] * 2))
    assert len(loads) == 1
    assert len({id(pipe.denoiser) for pipe in pipes}) == 1
    assert [type(pipe.scheduler).__name__ for pipe in pipes] == ["DDIMScheduler", "DDPMScheduler"] * 2


def test_the_models_used_last_stay_in_memory(models, monkeypatch):
    loads = []
    shared = models.pipeline(models.catalogue.card("emoji64"), None)
    monkeypatch.setattr(Pipeline, "from_card", lambda card, load: loads.append(card.folder.name) or shared)
    own = Models(models.catalogue.folder, device="cpu")
    for name in ("emoji64", "./cats", "emoji64", "./plain/tiny", "emoji64", "./cats"):
        own.pipeline(own.catalogue.card(name), None)
    assert MAX_LOADED == 2
    assert loads == ["emoji64", "cats", "tiny", "cats"]


def test_a_model_in_use_stays_in_memory(models, monkeypatch):
    loads = []
    shared = models.pipeline(models.catalogue.card("emoji64"), None)
    monkeypatch.setattr(Pipeline, "from_card", lambda card, load: loads.append(card.folder.name) or shared)
    own = Models(models.catalogue.folder, device="cpu")
    run = Run.prepare(Request(model="emoji64"), own.catalogue.card("emoji64"), COMMAND)
    with own.using(run):
        for name in ("./cats", "./plain/tiny", "emoji64"):
            own.pipeline(own.catalogue.card(name), None)
    for name in ("./cats", "./plain/tiny", "emoji64"):
        own.pipeline(own.catalogue.card(name), None)
    assert loads == ["emoji64", "cats", "tiny", "cats", "tiny", "emoji64"]


def test_a_model_of_another_precision_is_another(models):
    card = models.catalogue.card("./plain/tiny")
    full, eight = (models.pipeline(card, None, precision).denoiser for precision in ("full", "int8"))
    assert eight is models.pipeline(card, None, "int8").denoiser is not full
    assert full is models.pipeline(card, None).denoiser


def test_warm_up_loads_the_model(models):
    own = Models(device="cpu")
    own.warm_up("emoji64")
    assert len(own._loaded) == 1


@pytest.mark.parametrize("error", [MemoryError("no memory"), DeviceLostError("the GPU failed")], ids=["memory", "lost"])
def test_warm_up_leaves_a_device_that_fails_to_the_first_run(models, monkeypatch, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(Pipeline, "from_card", fail)
    own = Models(device="cpu")
    own.warm_up("emoji64")
    with pytest.raises(type(error)):
        own.pipeline(own.catalogue.card("emoji64"), None)
