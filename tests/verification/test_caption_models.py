"""`verify` and `bench` of Z-Image: every part passes on a tiny folder, and a part that differs is found."""

import pytest
import torch

from fastdiff.models.z_image import ZImageTransformer2DModel
from fastdiff.requests.request import Request
from fastdiff.text.chat_tokenizer import ChatTokenizer
from fastdiff.verification import speed
from fastdiff.verification.models import compare_with_diffusers
from fastdiff.verification.precisions import compare_precisions
from fastdiff.verification.speed import Bench
from tests.adapters.formats import save
from tests.parity.z_image import loras, tiny

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


def test_loras_of_several_alphas_are_loaded_by_diffusers(folder, tmp_path):
    transformer = tiny.pipeline(lambda model: None).transformer
    for name, form in (("a", loras.in_kohya(loras.random_loras(transformer), (2.0, 4.0))),
                       ("b", loras.in_lokr(transformer))):  # fmt: skip
        save(tmp_path / f"{name}.safetensors", form)
    file, other = (str(tmp_path / f"{name}.safetensors") for name in "ab")
    request = Request(model=str(folder), num_inference_steps=2, lora=(f"{file}:0.5",))
    found = compare_with_diffusers(request, "cpu")
    assert found.passed and found.loras == [f"lora {file}, weight 0.5: loaded by diffusers and peft"]
    both = Request(model=str(folder), num_inference_steps=2, lora=(file, other))
    found = compare_with_diffusers(both, "cpu")
    assert found.passed and all("merged by hand" in line for line in found.loras)


def test_a_transformer_that_differs_is_found(folder, monkeypatch):
    step = ZImageTransformer2DModel._step
    monkeypatch.setattr(ZImageTransformer2DModel, "_step", lambda *args: step(*args) * torch.tensor(1.01))
    assert "transformer t=0.5" in failed(folder)


SIZE = {"height": 16, "width": 24}


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_precision_is_measured_on_each_part_and_on_pictures(folder, precision):
    request = Request(model=str(folder), precision=precision, num_inference_steps=3, guidance_scale=2.0, **SIZE)
    found = compare_precisions(request, "cpu")
    *parts, pictures = found.differences
    assert [each.what for each in parts] == ["text_encoder", "transformer t=857.143", "transformer t=600"]
    assert all(each.unit == "%" and 0.01 < each.beside < 2 and each.beside < each.error < 20 for each in parts)
    assert (pictures.what, pictures.unit) == ("3 steps of flow-euler", "dB") and found.passed
    assert 20 < pictures.error < pictures.beside


def test_a_lone_transformer_is_compared(folder):
    found = compare_with_diffusers(Request(model=str(folder / "transformer")), "cpu")
    assert found.passed and [each.what for each in found.comparisons] == [
        f"forward t={t}" for t in (0, 249, 499, 749, 999)
    ]


def test_bench_times_the_transformer_and_measures_its_error(folder, monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 1e-4)
    for model, scale in ((folder, 2), (folder / "transformer", 1)):
        for precision, most in (("full", 1e-5), ("int8", 0.1)):
            size = {name: side * scale // 2 for name, side in SIZE.items()}
            request = Request(model=str(model), precision=precision, **size)
            bench = Bench.prepare(request, "cpu", batch_size=2, with_compile=False)
            bench.run()
            ours, eager = bench.rows
            assert ours.ms > 0 and eager.ms > 0 and eager.error == 0 and 0 < ours.error < most
            assert bench.as_dict()["class"] == "ZImageTransformer2DModel" and bench.notes == []
    assert ours.error > 1e-4


def test_bench_has_the_trained_size_by_default(folder):
    assert Bench.prepare(Request(model=str(folder)), "cpu").size == (128, 128)
