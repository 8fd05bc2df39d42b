"""Embeddings are recognised by their headers, and other files are refused in one line that says what they are."""

import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from fastdiff import InputError
from fastdiff.checkpoints.single_files.embeddings import read_embedding
from tests.checkpoints.single_files import headers


def read(tmp_path, state, name="blurb.safetensors"):
    save_file(state, tmp_path / name)
    return read_embedding(tmp_path / name)


@pytest.mark.parametrize(
    ("state", "token", "vectors", "base"),
    [
        ({"<cat-toy>": torch.ones(768)}, "<cat-toy>", 1, "Stable Diffusion 1"),
        ({"<cat-toy>": torch.ones(2, 1024, dtype=torch.bfloat16)}, "<cat-toy>", 2, "Stable Diffusion 2"),
        ({"emb_params": torch.ones(16, 768, dtype=torch.float16)}, "blurb", 16, "Stable Diffusion 1"),
        ({"clip_g": torch.ones(3, 1280), "clip_l": torch.ones(3, 768)}, "blurb", 3, "Stable Diffusion XL"),
        ({"<g>": torch.ones(1280)}, "<g>", 1, "the second text encoder of Stable Diffusion XL"),
        ({"<x>": torch.ones(5)}, "<x>", 1, "a text encoder of width 5"),
    ],
)
def test_every_form_is_recognised(tmp_path, state, token, vectors, base):
    found = read(tmp_path, state)
    assert (found.token, found.vectors, found.base) == (token, vectors, base)


def test_a_pair_is_in_the_order_of_the_encoders(tmp_path):
    found = read(tmp_path, {"clip_g": torch.ones(3, 1280), "clip_l": torch.ones(3, 768)})
    assert [(i, each.key, each.width) for i, each in found.tensors.items()] == [(0, "clip_l", 768), (1, "clip_g", 1280)]
    assert [*read(tmp_path, {"clip_g": torch.ones(3, 1280)}).tensors] == [1]


LORA = "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight"


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (headers.SD1, "is a checkpoint of Stable Diffusion 1, and no embedding"),
        (headers.SDXL, "is a checkpoint of Stable Diffusion XL, and no embedding"),
        (headers.VAE, "is a VAE of .*, and no embedding"),
        ({LORA: (4, 4)}, "is a LoRA, and no embedding"),
        ({LORA: (4, 4), "emb_params": (1, 4)}, "is a LoRA, and no embedding"),
        ({}, "is empty: it holds no tensors"),
        ({"a": (1, 2), "b": (1, 2)}, "'a' has the dtype U8"),
        ({"emb_params": (1, 768)}, "'emb_params' has the dtype U8, not of real numbers"),
    ],
)
def test_other_files_are_named(tmp_path, shapes, message):
    assert_refused(headers.write(tmp_path / "file.safetensors", shapes), message)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": torch.ones(1, 2), "b": torch.ones(1, 2)}, "is no embedding: its tensors are 'a', 'b'..."),
        ({"emb_params": torch.ones(1, 2), "b": torch.ones(1, 2)}, "is no embedding: its tensors are"),
        ({"a": torch.ones(1, 2, 2)}, r"'a' has the shape \(1, 2, 2\); an embedding has"),
        ({"a": torch.ones(())}, r"'a' has the shape \(\)"),
        ({"a": torch.ones(0, 2)}, "is empty: 'a' has the shape"),
        ({"a": torch.ones(2, 0)}, "is empty: 'a' has the shape"),
        ({"clip_l": torch.ones(1, 2), "clip_g": torch.ones(2, 2)}, "clip_l and clip_g have 1 and 2 vectors"),
    ],
)
def test_other_tensors_are_refused(tmp_path, state, message):
    save_file(state, tmp_path / "file.safetensors")
    assert_refused(tmp_path / "file.safetensors", message)


def test_damaged_files_and_pickles(tmp_path):
    save_file({"a": torch.ones(4, 8)}, tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    cases = {
        "missing.safetensors": (None, "does not exist"),
        "nothing.safetensors": (b"", "is damaged or not a safetensors file"),
        "cut.safetensors": (data[:-4], "is truncated: 'a' ends beyond the end"),
        "text.safetensors": (b"x" * 64, "is damaged or not a safetensors file"),
        "pickled.pt": (pickle.dumps({}), "is a pickle, and .* run code .*; convert it where you trust it"),
        "nothing.bin": (b"", "is a pickle"),
        "renamed.safetensors": (pickle.dumps({}), "is a pickle"),
        "page.safetensors": (b"<!doctype html>", "is a web page"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert_refused(tmp_path / name, message)
    with zipfile.ZipFile(tmp_path / "zipped.pt", "w") as archive:
        archive.writestr("data.pkl", b"")
    assert_refused(tmp_path / "zipped.pt", "is a pickle.*'emb_params'")
    (tmp_path / "folder.safetensors").mkdir()
    assert_refused(tmp_path / "folder.safetensors", "is not a regular file")


def assert_refused(path, message):
    with pytest.raises(InputError, match=message) as error:
        read_embedding(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
