"""Models shared by all sessions: loaded once, the most recent ones kept in memory, warm before the first click."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import DeviceLostError
from fastdiff.pipelines import Pipeline
from fastdiff.ui.engine import MAX_LOADED, Engine

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
