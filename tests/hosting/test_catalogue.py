"""The models on offer: folders and single files, links out of the models folder, the hub, files that cannot be read."""

import json
import os
import shutil
from pathlib import Path

import pytest

from fastdiff.checkpoints import hub, model_hash
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.single_files import reading
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue import Catalogue, catalogue
from tests.checkpoints.single_files import headers
from tests.fuzz.named.hostile_files import CONTENTS
from tests.fuzz.named.hostile_files import REFUSED as HOSTILE

BUNDLED = list(hub.bundled_models())
LORA = {"lora_unet_mid_block.lora_up.weight": (2, 2)}
POSIX = pytest.mark.skipif(os.name != "posix", reason="named pipes, and names of bytes")


def names(folder, **options) -> list[str]:
    return Catalogue(folder, **options).names()


def test_bundled_models_and_those_below_the_folder(catalogue):
    below = ["./cats", "./plain/tiny", "./text/sd1", "./text/sdxl"]
    assert catalogue.names() == ["emoji-sd", "emoji64", "emoji64-dit", *below]


def test_without_a_folder_only_bundled_models(catalogue):
    assert names(None) == BUNDLED


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
    with pytest.raises(InputError, match="is unknown"):
        Catalogue(tmp_path / "models").card("./model")


def test_a_loop_of_links_ends(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path)
    assert names(tmp_path) == BUNDLED


def test_models_that_cannot_be_drawn_with_are_not_offered(card_folder, tmp_path):
    card_folder("embeds", class_embed_type="timestep", num_class_embeds=None)
    (card_folder("broken") / "model_index.json").write_text("{")
    offered = Catalogue(tmp_path)
    assert offered.names() == BUNDLED
    with pytest.raises(InputError, match="no control for class_embed_type timestep"):
        offered.card("./embeds")


@pytest.fixture
def spoil(tmp_path):
    """Break a model folder below tmp_path in the named way, or replace it with something else."""

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
    offered = Catalogue(tmp_path)
    assert offered.names() == [*BUNDLED, "./a", "./c"]
    (name, problem), *more = offered.left_out().items()
    assert name == "./bad" and problem and len(problem.splitlines()) == 1 and not more


def test_planners_of_trajectories_are_left_out_with_the_reason(save_planner, tmp_path):
    save_planner("DDPM")
    catalogue = Catalogue(tmp_path)
    assert catalogue.names() == BUNDLED
    assert "it plans trajectories, but the page draws pictures" in catalogue.left_out()["./planner"]
    with pytest.raises(InputError, match="it plans trajectories"):
        catalogue.card("./planner")


def test_a_model_of_prompts_without_a_text_encoder_is_left_out_with_the_reason(text_folder, tmp_path):
    folder = shutil.copytree(text_folder("sdxl"), tmp_path / "sdxl")
    index = json.loads((folder / "model_index.json").read_text())
    parts = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    (folder / "model_index.json").write_text(json.dumps(index | {key: [None, None] for key in parts}))
    catalogue = Catalogue(tmp_path)
    assert catalogue.names() == BUNDLED
    assert "model ./sdxl: it has no text encoder" in catalogue.left_out()["./sdxl"]


def test_tokenizers_are_read_once(catalogue):
    card = catalogue.card("./text/sdxl")
    assert len(catalogue.tokenizers(card)) == 2
    assert catalogue.tokenizers(card) is catalogue.tokenizers(catalogue.card("./text/sdxl"))


def test_a_circle_of_links_in_a_model_stops_no_list(card_folder, tmp_path, spoil):
    card_folder("a")
    spoil(card_folder("bad"), "circle-inside")
    assert "./a" in names(tmp_path)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")])
@pytest.mark.parametrize("place", ["bad", "bad/unet", "store"])
def test_a_folder_that_cannot_be_searched(card_folder, tmp_path, monkeypatch, place, error):
    """Fail to read as if without permission, or as if removed meanwhile. Root, who may run tests, can read all."""
    for name in ("a", "bad", "store/model"):
        card_folder(name)
    listing = Path.iterdir

    def iterdir(folder):
        if folder == tmp_path / place:
            raise type(error)(*error.args, str(folder))
        return listing(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    offered = Catalogue(tmp_path)
    left = [f"./{name}" for name in ("bad", "store/model") if not name.startswith(place.partition("/")[0])]
    assert offered.names() == [*BUNDLED, "./a", *left]
    assert error.strerror in offered.left_out()[f"./{place.partition('/')[0]}"]


@POSIX
def test_a_name_that_no_page_can_show(card_folder, tmp_path):
    shutil.copytree(card_folder("a"), tmp_path / os.fsdecode(b"caf\xe9"))
    offered = Catalogue(tmp_path)
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
    offered = Catalogue(tmp_path)
    assert offered.names() == [*BUNDLED, "./a"]
    assert "KeyError: 'surprise'" in offered.left_out()["./bad"]


def test_a_link_out_of_the_folder_is_named(card_folder, tmp_path):
    outside = card_folder("outside/model")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(outside)
    assert "points outside" in Catalogue(tmp_path / "models").left_out()["./linked"]


def test_the_hub_is_asked_only_where_it_is_allowed(card_folder, tmp_path, monkeypatch):
    folder = card_folder("hub")
    monkeypatch.setattr(hub, "resolve", lambda name: folder)
    monkeypatch.setattr(catalogue, "cached_models", lambda: {"org/cached": folder})
    assert names(None, allow_hub=True) == [*BUNDLED, "org/cached"]
    assert Catalogue(None, allow_hub=True).card("org/name").folder == folder
    with pytest.raises(InputError, match="--allow-hub"):
        Catalogue(None).card("org/cached")


@pytest.mark.parametrize("name", ["/etc", "../etc", "org/name/more", "https://host/x", "", "org/\0"])
def test_only_hub_ids_go_to_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "resolve", lambda name: pytest.fail(f"{name} was asked for"))
    with pytest.raises(InputError, match="or a hub id "):
        Catalogue(None, allow_hub=True).card(name)


def test_a_folder_of_the_process_is_no_hub_id(card_folder, tmp_path, monkeypatch):
    card_folder("org/name")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is unknown"):
        Catalogue(None, allow_hub=True).card(os.path.join("org", "name"))


def mine(catalogue: Catalogue) -> list[str]:
    """Return the names of the models that are not bundled."""
    return [name for name in catalogue.names() if name not in BUNDLED]


def test_the_list_follows_the_folder(tmp_path):
    catalogue = Catalogue(tmp_path)
    assert mine(catalogue) == []
    headers.write(tmp_path / "a.safetensors", headers.SD1)
    assert mine(catalogue) == ["./a.safetensors"]
    headers.write(tmp_path / "a.safetensors", LORA)
    assert mine(catalogue) == []
    headers.write(tmp_path / "a.safetensors", headers.SDXL)
    assert catalogue.card("./a.safetensors").size == (1024, 1024)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(InputError, match=r"model './a\.safetensors' is unknown"):
        catalogue.card("./a.safetensors")


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (LORA, "is a LoRA: changes a model"),
        (headers.unet(768, channels=9), "is a U-Net of Stable Diffusion 1 for inpainting, without vae and"),
        (headers.unet(1280), "is a U-Net of Stable Diffusion XL's refiner, without vae and text_encoder_2"),
        ({"control_model.input_hint_block.0.weight": (2, 2)}, "is a ControlNet"),
        (headers.VAE, "is a VAE of .*, without a U-Net"),
        (headers.unet(768), "is a U-Net of Stable Diffusion 1, without vae and text_encoder"),
        ({key: shape for key, shape in headers.SD1.items() if key not in headers.VAE}, "holds no VAE"),
        ({"double_blocks.0.weight": (2, 2)}, "is Flux"),
    ],
)
def test_files_that_draw_nothing_alone_are_left_out_with_the_reason(tmp_path, shapes, reason):
    headers.write(tmp_path / "sdxl.safetensors", headers.SDXL)
    headers.write(tmp_path / "other.safetensors", shapes)
    catalogue = Catalogue(tmp_path)
    assert mine(catalogue) == ["./sdxl.safetensors"]
    with pytest.raises(InputError, match=rf"^\./other\.safetensors {reason}"):
        catalogue.card("./other.safetensors")
    assert list(catalogue.left_out()) == ["./other.safetensors"]


MANY_KEYS = "only many keys"  # 100,000 keys take seconds


@pytest.mark.parametrize(
    "names", [{*HOSTILE} - {MANY_KEYS}, pytest.param({*HOSTILE}, marks=pytest.mark.slow)], ids=["few-keys", "all"]
)
def test_hostile_files_stop_no_list(tmp_path, names):
    """Some are left out only when their tensors are compared with the configs, which is before they are loaded."""
    for name in names:
        (tmp_path / f"{name}.safetensors").write_bytes(CONTENTS[name](500))
    (tmp_path / "gone.safetensors").symlink_to("nowhere")
    (tmp_path / "circle.safetensors").symlink_to("circle.safetensors")
    if os.name == "posix":
        os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "a folder.safetensors").mkdir()
    headers.write(tmp_path / "sound.safetensors", headers.SDXL)
    catalogue = Catalogue(tmp_path)
    listed, left = mine(catalogue), catalogue.left_out()
    files = {f"./{path.name}" for path in tmp_path.iterdir()} - {"./a folder.safetensors"}
    assert {*listed, *left} == files and "./sound.safetensors" in listed
    told = {"a LoRA", "two models", "two U-Nets", "only paths", MANY_KEYS, "truncated", "100 MB of header"} & names
    told |= {"2^63 of header", "a pickle", "gone", "circle"}
    assert {f"./{name}.safetensors" for name in told} <= left.keys()
    assert all("\n" not in reason and str(tmp_path) not in reason for reason in left.values()), left


def test_a_header_is_read_once_until_its_file_changes(tmp_path, monkeypatch):
    read = []
    header = reading.read_header
    monkeypatch.setattr(reading, "read_header", lambda path: read.append(path.name) or header(path))
    monkeypatch.setattr(model_hash, "file_hash", lambda path: pytest.fail("a whole file is read"))
    headers.write(tmp_path / "a.safetensors", headers.SDXL)
    headers.write(tmp_path / "b.safetensors", LORA)
    catalogue = Catalogue(tmp_path)
    for _ in range(3):
        assert mine(catalogue) == ["./a.safetensors"]
        catalogue.card("./a.safetensors")
    assert read == ["a.safetensors", "b.safetensors"]
    headers.write(tmp_path / "a.safetensors", headers.SD1)
    assert catalogue.card("./a.safetensors").size == (512, 512)
    assert read == ["a.safetensors", "b.safetensors", "a.safetensors"]
