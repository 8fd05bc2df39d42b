"""The models on offer: links that lead out of the models folder, the hub, and loading each model once."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdiff.checkpoints import hub
from fastdiff.errors import InputError
from fastdiff.pipeline import Pipeline
from fastdiff.ui.models import MAX_LOADED, Models

BUNDLED = list(hub.bundled_models())


def names(folder, **options) -> list[str]:
    return Models(folder, device="cpu", **options).names()


def test_bundled_models_and_those_below_the_folder(models):
    assert models.names() == ["emoji64", "emoji64-dit", "./cats", "./plain/tiny"]


def test_without_a_folder_only_bundled_models(models):
    assert names(None) == BUNDLED


def test_no_such_folder(tmp_path):
    with pytest.raises(InputError, match=r"--models-dir .* is not a folder"):
        Models(tmp_path / "missing")


def test_links_that_stay_inside_are_followed(card_folder, tmp_path):
    card_folder("store/model")
    (tmp_path / "linked").symlink_to(tmp_path / "store" / "model")
    assert names(tmp_path) == [*BUNDLED, "./linked", "./store/model"]


@pytest.mark.parametrize("place", ["", "unet", "unet/config.json", "scheduler", "model_index.json", "fastdiff.json"])
def test_links_out_of_the_folder_are_left_out(card_folder, tmp_path, place):
    outside = card_folder("outside/model", info={}) / place
    inside = card_folder("models/model")
    target = inside / place
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    target.symlink_to(outside)
    assert names(tmp_path / "models") == BUNDLED
    with pytest.raises(InputError, match="is not here"):
        Models(tmp_path / "models", device="cpu").card("./model")


def test_a_loop_of_links_ends(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path)
    assert names(tmp_path) == BUNDLED


def test_models_that_cannot_be_drawn_with_are_not_offered(card_folder, tmp_path):
    card_folder("embeds", class_embed_type="timestep", num_class_embeds=None)
    (card_folder("broken") / "model_index.json").write_text("{")
    offered = Models(tmp_path, device="cpu")
    assert offered.names() == BUNDLED
    with pytest.raises(InputError, match="no control for class_embed_type timestep"):
        offered.card("./embeds")


def test_the_hub_is_asked_only_where_it_is_allowed(card_folder, tmp_path, monkeypatch):
    folder = card_folder("hub")
    monkeypatch.setattr(hub, "resolve", lambda name: folder)
    monkeypatch.setattr(hub, "cached_models", lambda: {"org/cached": folder})
    assert names(None, allow_hub=True) == [*BUNDLED, "org/cached"]
    assert Models(None, allow_hub=True, device="cpu").card("org/name").folder == folder
    with pytest.raises(InputError, match="--allow-hub"):
        Models(None, device="cpu").card("org/cached")


@pytest.mark.parametrize("name", ["/etc", "../etc", "org/name/more", "https://host/x", "", "org/\0"])
def test_only_hub_ids_go_to_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "resolve", lambda name: pytest.fail(f"{name} was asked for"))
    with pytest.raises(InputError, match="or a hub id org/name"):
        Models(None, allow_hub=True, device="cpu").card(name)


def test_a_folder_of_the_process_is_no_hub_id(card_folder, tmp_path, monkeypatch):
    card_folder("org/name")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is not here"):
        Models(None, allow_hub=True, device="cpu").card(os.path.join("org", "name"))


def test_many_requests_load_a_model_once(monkeypatch):
    loads = []
    load = Pipeline.from_card
    monkeypatch.setattr(Pipeline, "from_card", lambda *args, **kw: loads.append(args) or load(*args, **kw))
    models = Models(device="cpu")
    card = models.card("emoji64")
    with ThreadPoolExecutor(4) as pool:
        pipes = list(pool.map(lambda scheduler: models.pipeline(card, scheduler), ["ddim", "ddpm"] * 2))
    assert len(loads) == 1
    assert len({id(pipe.denoiser) for pipe in pipes}) == 1
    assert [type(pipe.scheduler).__name__ for pipe in pipes] == ["DDIMScheduler", "DDPMScheduler"] * 2


def test_the_models_used_last_stay_in_memory(models, monkeypatch):
    loads = []
    shared = models.pipeline(models.card("emoji64"), None)
    monkeypatch.setattr(Pipeline, "from_card", lambda card, device: loads.append(card.folder.name) or shared)
    own = Models(models.folder, device="cpu")
    for name in ("emoji64", "./cats", "emoji64", "./plain/tiny", "emoji64", "./cats"):
        own.pipeline(own.card(name), None)
    assert MAX_LOADED == 2
    assert loads == ["emoji64", "cats", "tiny", "cats"]


def test_a_cpu_takes_fewer_steps(models):
    assert models.default_sampling(models.card("emoji64")).num_inference_steps == 20
    assert models.default_sampling(models.card("./plain/tiny")).num_inference_steps == 20


def test_warm_up_loads_the_model(models):
    own = Models(device="cpu")
    own.warm_up("emoji64")
    assert len(own._loaded) == 1
