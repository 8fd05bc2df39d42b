"""`verify` of Z-Image: every part passes on a tiny folder, and a part that differs is found."""

from dataclasses import replace

import pytest
import torch

from fastdiff.errors import InputError
from fastdiff.models.z_image import ZImageTransformer2DModel
from fastdiff.requests.request import Request
from fastdiff.text.chat_tokenizer import ChatTokenizer
from fastdiff.verification.models import compare_with_diffusers
from fastdiff.verification.peers import Subject
from fastdiff.verification.precisions import compare_precisions
from tests.parity.z_image import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(randomise, tmp_path):
    tiny.pipeline(randomise).save_pretrained(tmp_path)
    return tmp_path


def failed(folder):
    found = compare_with_diffusers(Request(model=str(folder), num_inference_steps=2), "cpu")
    return [each.what for each in found.comparisons if not each.passed]


def test_each_part_is_compared(folder, monkeypatch):
    assert failed(folder) == []
    read = ChatTokenizer.__call__
    monkeypatch.setattr(ChatTokenizer, "__call__", lambda self, text, *length: read(self, text.upper(), *length))
    assert failed(folder) == ["tokenizer ids", "2 steps of flow-euler, guidance 0", "2 steps of flow-euler, guidance 4"]


def test_a_transformer_that_differs_is_found(folder, monkeypatch):
    step = ZImageTransformer2DModel._step
    monkeypatch.setattr(ZImageTransformer2DModel, "_step", lambda *args: step(*args) * torch.tensor(1.01))
    assert "transformer t=0.5" in failed(folder)


def test_what_makes_no_captions_says_so(folder):
    request = Request(model=str(folder), num_inference_steps=1)
    for command, run in (
        ("bench", lambda: Subject.find(request)),
        ("verify --precision", lambda: compare_precisions(replace(request, precision="int8"), "cpu")),
        ("verify", lambda: compare_with_diffusers(replace(request, model=str(folder / "transformer")), "cpu")),
    ):
        with pytest.raises(InputError, match=f": {command} makes no captions for Z-Image; `verify` compares"):
            run()
