"""offload: each part is on the GPU only while it runs, and the pictures are the same."""

import gc
from contextlib import contextmanager

import pytest
import torch

from fastdiff import Pipeline
from fastdiff.errors import InputError
from fastdiff.pipelines import parts

CPU = torch.device("cpu")
PROMPT = "a photo of the cat"


def draw(pipe, **options):
    return pipe(PROMPT, num_inference_steps=2, output_type="pt", **options).images


def test_a_cpu_has_no_card_to_save(text_folder):
    with pytest.raises(InputError, match="offload: it saves GPU memory, but the device is the CPU; leave it out"):
        Pipeline.from_pretrained(text_folder("sd1"), device="cpu", offload=True)
    with pytest.raises(InputError, match="offload: 1 is not true or false"):
        Pipeline.from_pretrained(text_folder("sd1"), device="cpu", offload=1)


def test_parts_take_turns_and_draw_the_same(text_folder, monkeypatch):
    turns = []
    on_gpu = parts.on_gpu

    @contextmanager
    def noted(models, device):
        turns.append([type(model).__name__ for model in models])
        try:
            with on_gpu(models, device):
                yield
        finally:
            turns.append("away")

    monkeypatch.setattr(parts, "on_gpu", noted)
    pipe = Pipeline.from_pretrained(text_folder("sdxl"), device=CPU)
    expected = draw(pipe)
    assert not turns
    assert torch.equal(draw(pipe.offloaded_from(CPU)), expected)
    encoders = ["CLIPTextModel", "CLIPTextModelWithProjection"]
    assert turns == [encoders, "away", ["UNet2DConditionModel"], "away", ["AutoencoderKL"], "away"]
    with pytest.raises(InputError, match="to: an offloaded pipeline moves its own parts"):
        pipe.to("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_a_gpu_holds_one_part_at_a_time(text_folder, kind):
    pictures, peaks = [], []
    for offload in (False, True):
        gc.collect()  # the previous pipeline has reference cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pipe = Pipeline.from_pretrained(text_folder(kind), device="cuda", dtype=torch.bfloat16, offload=offload)
        pictures += [draw(pipe, seed=[1, 2]), draw(pipe, seed=[1, 2])]  # the second call uses CUDA graphs
        steps = list(pipe.stream(PROMPT, num_inference_steps=3, seed=3))
        assert all(step.preview() for step in steps)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert {model.device.type for model in pipe.models} == {"cpu" if offload else "cuda"}
        del pipe, steps
    assert all(torch.equal(picture, pictures[0]) for picture in pictures)
    assert peaks[1] <= peaks[0]
