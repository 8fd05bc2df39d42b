"""The LoRAs and embeddings on offer: those that fit the model, by names that open no other file."""

import shutil

import pytest
import torch

from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue.offered import MAX_LORAS, OptionFiles
from fastdiff.requests.file_option import FileOption
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model
from fastdiff.ui.drawing import prepare
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.parts.subject import count_tokens
from tests.adapters.formats import save
from tests.parity.z_image import loras, tiny

LIMITS = Limits(pictures=4, steps=50, side=128)


def test_those_that_fit_the_model_are_on_offer(equipped):
    files, cards = equipped.catalogue.option_files, equipped.catalogue
    sd1, labels = cards.card("./text/sd1"), cards.card("emoji64")
    assert [*files.loras(sd1)] == ["broken.safetensors", "deep/detail.safetensors", "style.safetensors"]
    assert [*files.embeddings(sd1)] == ["blurb", "<dog>"]
    assert not files.loras(labels) and not files.embeddings(labels)


def test_loras_of_z_image_fit_z_image_alone(equipped, folders, tmp_path):
    tiny.pipeline(lambda model: None).save_pretrained(tmp_path / "z-image")
    request = Request(model=str(tmp_path / "z-image"))
    shutil.copytree(folders[0], tmp_path / "loras")
    name, pair = "layers.0.attention.to_q", loras.Pair(torch.ones(2, 48), torch.ones(48, 2))
    save(tmp_path / "loras" / "ink.safetensors", loras.in_kohya({name: pair}))
    files = OptionFiles(tmp_path / "loras")
    assert [*files.loras(find_model(request))] == ["ink.safetensors"]
    assert "ink.safetensors" not in files.loras(equipped.catalogue.card("./text/sd1"))


def test_a_new_file_is_on_offer_and_headers_are_read_once(folders, shared, tmp_path, monkeypatch):
    shutil.copy(folders[0] / "style.safetensors", tmp_path)
    files, card = OptionFiles(tmp_path), shared.catalogue.card("./text/sd1")
    assert [*files.loras(card)] == ["style.safetensors"]
    shutil.copy(folders[0] / "style.safetensors", tmp_path / "again.SFT")
    assert [*files.loras(card)] == ["again.SFT", "style.safetensors"]
    monkeypatch.setattr(files._loras, "_read_header", None)
    assert [*files.loras(card)] == ["again.SFT", "style.safetensors"]
    (tmp_path / "style.safetensors").unlink()
    assert [*files.loras(card)] == ["again.SFT"]


@pytest.mark.parametrize("name", ["../embeddings/style.safetensors", "wide.safetensors", "blurb.safetensors", "x"])
def test_a_name_opens_no_other_file(equipped, folders, name):
    asked = UncheckedRequest(model="./text/sd1", prompt="cat")
    for each in (name, str(folders[0] / name), str(folders[0] / "style.safetensors"), f"deep/../{name}"):
        with pytest.raises(InputError, match=r"^lora: .* is not on offer for \./text/sd1; choose one of broken"):
            prepare(UncheckedRequest(**{**vars(asked), "lora": [each]}), equipped, LIMITS)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"lora": "style.safetensors"}, "lora: .* is not a list"),
        ({"lora": [5]}, "lora: .5. is not a list"),
        ({"lora": ["style.safetensors"] * (MAX_LORAS + 1)}, "lora: .* is not a list of up to 8 names"),
        ({"lora": ["style.safetensors", "style.safetensors:2"]}, "lora: style.safetensors is given twice"),
        ({"lora": ["style.safetensors:x"]}, "its weight 'x' is not a number"),
        ({"lora": ["style.safetensors:nan"]}, "its weight 'nan' is not a number"),
        ({"lora": ["style.safetensors"], "model": "emoji64", "prompt": None}, "lora: .* not on offer for emoji64"),
    ],
)
def test_refusals(equipped, asked, message):
    with pytest.raises(InputError, match=message):
        prepare(UncheckedRequest(**{"model": "./text/sd1", "prompt": "cat"} | asked), equipped, LIMITS)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(InputError, match=r"--lora-dir: .*nowhere is not a folder; give the folder of your files"):
        OptionFiles(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"--embedding-dir: .*nowhere is not a folder; give the folder of your files"):
        OptionFiles(None, tmp_path / "nowhere")


def test_the_embeddings_of_a_run_are_those_in_its_texts(equipped, folders):
    def used(prompt: str, negative: str | None = None) -> list[str | None]:
        asked = UncheckedRequest(model="./text/sd1", prompt=prompt, negative_prompt=negative)
        return [FileOption.parse(text).value for text in prepare(asked, equipped, LIMITS).request.embedding]

    assert used("a cat") == []
    assert used("a BLURB cat", "no <dog>") == ["blurb", "<dog>"]
    assert used("a <dog>") == ["<dog>"]
    assert used("cat " * 80 + "blurb") == [], "the model does not read so far"


def test_the_token_counter_knows_the_embeddings(equipped, shared):
    counts = [count_tokens(each.catalogue, [each.catalogue.card("./text/sd1")], "blurb") for each in (equipped, shared)]
    assert "2 of 22 tokens" in counts[0] and counts[0] != counts[1]


def test_a_picture_brings_its_loras_back_by_name_hash_or_last_part(equipped):
    files, card = equipped.catalogue.option_files, equipped.catalogue.card("./text/sd1")
    digits = file_hash(files.loras(card)["deep/detail.safetensors"])
    record = {"lora": ["style.safetensors:0.5", "old.safetensors:2", "/x/detail.safetensors", "gone.safetensors:1"]}
    found, lines = files.here(record | {"lora_hashes": ["0" * 64, digits, "x", ""]}, "p.png", card)
    assert found["lora"][:2] == ["style.safetensors:0.5", "deep/detail.safetensors:2"]
    assert found["lora"][2:] == ["deep/detail.safetensors:1"]
    assert lines[0].startswith("style.safetensors is not the file that drew p.png: its hash is ")
    assert lines[-1] == "not restored: the LoRA gone.safetensors, which is not here by name or hash"
    found, _ = files.here({"lora": ["x/style.safetensors:1"], "lora_hashes": [digits]}, "p.png", card)
    assert found["lora"] == ["deep/detail.safetensors:1"], "the hash counts before the last part of the name"
    _, lines = files.here({"embedding": ["a/dog.safetensors:<dog>", "a/cat.safetensors:<cat>"]}, "p.png", card)
    assert lines == ["not restored: the embedding cat.safetensors (<cat>), which is not here"]


def test_users_see_names_and_not_the_servers_folders(equipped, folders):
    files, path = equipped.catalogue.option_files, folders[0] / "deep" / "detail.safetensors"
    request = Request(lora=(f"{path}:0.5",), embedding=(f"{folders[1] / 'dog.safetensors'}:<dog>",))
    named = files.with_names(request)
    assert (named.lora, named.embedding) == (("deep/detail.safetensors:0.5",), ("dog.safetensors:<dog>",))
    assert files.without_paths(f"{path} is bad", request) == "deep/detail.safetensors is bad"
