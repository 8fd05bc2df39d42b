"""The hash of a model's weights, as other tools compute it."""

import hashlib
import json
import os
import shutil

import pytest

from fastdiff.checkpoints import hub, model_hash
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import begin_files_hash, begin_hash, begin_sha256
from fastdiff.errors import InputError

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(hub.bundled_models()["emoji64"], tmp_path / "model")


@pytest.fixture
def card(model):
    return ModelCard.read("model", model)


def test_it_is_that_of_the_weights_file(card, model):
    assert begin_hash(card, None).result() == hashlib.sha256((model / "unet" / WEIGHTS).read_bytes()).hexdigest()


def test_shards_count_as_one_file(card, model):
    (model / "unet" / WEIGHTS).unlink()
    shards = {f"part-{i}.safetensors": bytes([i]) * 5_000_000 for i in range(2)}
    for name, content in shards.items():
        (model / "unet" / name).write_bytes(content)
    index = {"weight_map": {"b": "part-1.safetensors", "a": "part-0.safetensors"}}
    (model / "unet" / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert begin_hash(card, None).result() == hashlib.sha256(b"".join(shards.values())).hexdigest()


def test_weights_that_are_missing_are_refused(card):
    with pytest.raises(InputError, match=r"has no diffusion_pytorch_model\.fp16\.safetensors"):
        begin_hash(card, "fp16")


def test_the_hash_of_all_files_is_that_of_their_contents(card, model, tmp_path):
    digits = begin_files_hash(card, None).result()
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert begin_files_hash(ModelCard.read("another name", copy), None).result() == digits
    (copy / "README.md").write_text("no file that a picture depends on")
    assert begin_files_hash(card, None).result() == digits


@pytest.mark.parametrize(
    "name", ["model_index.json", "scheduler/scheduler_config.json", "unet/config.json", f"unet/{WEIGHTS}"]
)
def test_every_file_that_is_loaded_bears_on_it(card, model, name):
    digits = begin_files_hash(card, None).result()
    (model / name).write_bytes((model / name).read_bytes() + b"\n")
    assert begin_files_hash(card, None).result() != digits


def test_tokenizers_and_text_encoders_bear_on_it(text_folder, tmp_path):
    folder = shutil.copytree(text_folder("sdxl"), tmp_path / "sdxl")
    for name in ("tokenizer", "tokenizer_2"):
        (folder / name / "merges.txt").write_text("#version: 0.2\n")  # as in older folders
    card = ModelCard.read("sdxl", folder)
    digits = {begin_files_hash(card, None).result()}
    changed = [*folder.glob("*/*.safetensors"), *folder.glob("tokenizer*/*.json"), *folder.glob("tokenizer*/*.txt")]
    for path in changed:
        path.write_bytes(path.read_bytes() + b"\n")
        digits.add(begin_files_hash(card, None).result())
    assert len(changed) > 6 and len(digits) == len(changed) + 1


def test_a_file_is_read_again_only_after_a_change_or_an_error(tmp_path, monkeypatch):
    file, read = tmp_path / "weights", []

    def failing(paths):
        read.append(paths)
        raise OSError("unreadable")

    file.write_bytes(b"one")
    with monkeypatch.context() as patch:
        patch.setattr(model_hash, "_sha256", failing)
        with pytest.raises(OSError, match="unreadable"):
            begin_sha256([file]).result()
    assert begin_sha256([file]).result() == hashlib.sha256(b"one").hexdigest()
    monkeypatch.setattr(model_hash, "_sha256", failing)
    assert begin_sha256([file]).result() == hashlib.sha256(b"one").hexdigest()
    assert len(read) == 1
    os.utime(file, ns=(0, 0))
    with pytest.raises(OSError, match="unreadable"):
        begin_sha256([file]).result()
