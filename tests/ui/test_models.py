"""The models on offer: links that lead out of the models folder, the hub, and loading each model once."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import DeviceLostError, InputError
from fastdiff.pipelines import Pipeline
from fastdiff.ui.models import MAX_LOADED, Models

EMOJI64 = hub.BUNDLED / "emoji64"
BUNDLED = list(hub.bundled_models())
POSIX = pytest.mark.skipif(os.name != "posix", reason="named pipes, and names of bytes")


def names(folder, **options) -> list[str]:
    return Models(folder, device="cpu", **options).names()


def test_bundled_models_and_those_below_the_folder(models):
    below = ["./cats", "./plain/tiny", "./text/sd1", "./text/sdxl"]
    assert models.names() == ["emoji-sd", "emoji64", "emoji64-dit", *below]


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


def test_a_scheduler_is_made_of_the_folders_and_not_of_the_models_default(card_folder, tmp_path):
    folder = card_folder("model", info={"scheduler": "euler-karras"})
    (weights,) = (EMOJI64 / "unet").glob("*.safetensors")
    shutil.copy(weights, folder / "unet")
    offered = Models(tmp_path, device="cpu")
    card = offered.card("./model")
    assert offered.pipeline(card, None).scheduler.config.use_karras_sigmas
    asked = offered.pipeline(card, "euler").scheduler
    assert not asked.config.use_karras_sigmas
    assert asked.config == Pipeline.from_card(ModelCard.read("m", folder), Load.of(scheduler="euler")).scheduler.config


@pytest.fixture
def spoil(tmp_path):
    """Spoil a model folder below tmp_path in the way of that name, or put something else in its place."""

    def spoil(folder: Path, how: str) -> None:
        index = folder / "model_index.json"
        if how == "no-json":
            index.write_text("{")
        elif how == "binary":
            index.write_bytes(b"\xff\xfe")
        elif how == "deep":
            index.write_text("[" * 100_000)
        elif how == "a-folder-for-a-file":
            index.unlink()
            index.mkdir()
        elif how == "dangling-file":
            index.unlink()
            index.symlink_to(folder / "gone")
        elif how == "pipe":
            index.unlink()
            os.mkfifo(index)
        elif how == "pipe-inside":
            (folder / "unet" / "config.json").unlink()
            os.mkfifo(folder / "unet" / "config.json")
        elif how == "circle-inside":
            (folder / "circle").symlink_to(folder / "circle")
        else:
            shutil.rmtree(folder)
            folder.symlink_to({"dangling": tmp_path / "gone", "circle": folder}[how])

    return spoil


@pytest.mark.parametrize(
    "how",
    [
        *("no-json", "binary", "deep", "a-folder-for-a-file", "dangling-file", "dangling", "circle"),
        *(pytest.param(pipe, marks=POSIX) for pipe in ("pipe", "pipe-inside")),
    ],
)
def test_a_bad_folder_leaves_the_others_in_the_list_and_is_named(card_folder, tmp_path, spoil, how):
    card_folder("a")
    spoil(card_folder("bad"), how)
    card_folder("c")
    offered = Models(tmp_path, device="cpu")
    assert offered.names() == [*BUNDLED, "./a", "./c"]
    (name, problem), *more = offered.left_out().items()
    assert name == "./bad" and problem and len(problem.splitlines()) == 1 and not more


def test_planners_of_trajectories_are_left_out_with_the_reason(save_planner, tmp_path):
    save_planner("DDPM")
    models = Models(tmp_path, device="cpu")
    assert models.names() == BUNDLED
    assert "it plans trajectories, and the page draws pictures" in models.left_out()["./planner"]
    with pytest.raises(InputError, match="it plans trajectories"):
        models.card("./planner")


def test_a_model_of_prompts_without_a_text_encoder_is_left_out_with_the_reason(text_folder, tmp_path):
    folder = shutil.copytree(text_folder("sdxl"), tmp_path / "sdxl")
    index = json.loads((folder / "model_index.json").read_text())
    parts = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    (folder / "model_index.json").write_text(json.dumps(index | {key: [None, None] for key in parts}))
    models = Models(tmp_path, device="cpu")
    assert models.names() == BUNDLED
    assert "model ./sdxl: it has no text encoder" in models.left_out()["./sdxl"]


@pytest.mark.parametrize("name", ["emoji64", "./text/sd1"])
def test_a_model_is_warm_before_the_first_click(models, monkeypatch, name):
    drawn = []
    monkeypatch.setattr(Models, "pipeline", lambda *args, load=Models.pipeline: drawn.append(load(*args)) or drawn[-1])
    models.warm_up(name)
    assert len(drawn) == 1


def test_tokenizers_are_read_once(models):
    card = models.card("./text/sdxl")
    assert len(models.tokenizers(card)) == 2
    assert models.tokenizers(card) is models.tokenizers(models.card("./text/sdxl"))


def test_a_circle_of_links_in_a_model_stops_no_list(card_folder, tmp_path, spoil):
    card_folder("a")
    spoil(card_folder("bad"), "circle-inside")
    assert "./a" in names(tmp_path)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")])
@pytest.mark.parametrize("place", ["bad", "bad/unet", "store"])
def test_a_folder_that_cannot_be_searched(card_folder, tmp_path, monkeypatch, place, error):
    """Without the permission to, or since it was removed meanwhile; a test may run as root, who may all."""
    for name in ("a", "bad", "store/model"):
        card_folder(name)
    listing = Path.iterdir

    def iterdir(folder):
        if folder == tmp_path / place:
            raise type(error)(*error.args, str(folder))
        return listing(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    offered = Models(tmp_path, device="cpu")
    left = [f"./{name}" for name in ("bad", "store/model") if not name.startswith(place.partition("/")[0])]
    assert offered.names() == [*BUNDLED, "./a", *left]
    assert error.strerror in offered.left_out()[f"./{place.partition('/')[0]}"]


@POSIX
def test_a_name_that_no_page_can_show(card_folder, tmp_path):
    shutil.copytree(card_folder("a"), tmp_path / os.fsdecode(b"caf\xe9"))
    offered = Models(tmp_path, device="cpu")
    assert offered.names() == [*BUNDLED, "./a"]
    assert list(offered.left_out().values()) == ["its name is not UTF-8; rename it"]


def test_an_error_that_nobody_thought_of_stops_no_list(card_folder, tmp_path, monkeypatch):
    card_folder("a"), card_folder("bad")
    read = ModelCard.read

    def failing(name, folder):
        if name == "./bad":
            raise KeyError("surprise")
        return read(name, folder)

    monkeypatch.setattr(ModelCard, "read", failing)
    offered = Models(tmp_path, device="cpu")
    assert offered.names() == [*BUNDLED, "./a"]
    assert "KeyError: 'surprise'" in offered.left_out()["./bad"]


def test_a_link_out_of_the_folder_is_named(card_folder, tmp_path):
    outside = card_folder("outside/model")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(outside)
    assert "leads out of" in Models(tmp_path / "models", device="cpu").left_out()["./linked"]


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
    monkeypatch.setattr(Pipeline, "from_card", lambda card, load: loads.append(card.folder.name) or shared)
    own = Models(models.folder, device="cpu")
    for name in ("emoji64", "./cats", "emoji64", "./plain/tiny", "emoji64", "./cats"):
        own.pipeline(own.card(name), None)
    assert MAX_LOADED == 2
    assert loads == ["emoji64", "cats", "tiny", "cats"]


def test_a_model_of_another_precision_is_another(models):
    card = models.card("./plain/tiny")
    full, eight = (models.pipeline(card, None, precision).denoiser for precision in ("full", "int8"))
    assert eight is models.pipeline(card, None, "int8").denoiser is not full
    assert full is models.pipeline(card, None).denoiser


def test_a_cpu_takes_fewer_steps(models):
    assert models.default_sampling(models.card("emoji64")).num_inference_steps == 20
    assert models.default_sampling(models.card("./plain/tiny")).num_inference_steps == 20


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
        own.pipeline(own.card("emoji64"), None)
