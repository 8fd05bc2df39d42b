"""`verify` of Z-Image: every part passes on a tiny folder, and a part that differs is found."""

import pytest
import torch

from fastdiff.models.z_image import ZImageTransformer2DModel
from fastdiff.requests.request import Request
from fastdiff.text.chat_tokenizer import ChatTokenizer
from fastdiff.verification.models import compare_with_diffusers
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
