"""Z-Image with weights in 8 bits and offloaded, on a CPU: near the full weights, the same bits in any batch."""

from contextlib import contextmanager

import pytest
import torch

import fastdiff
from fastdiff.kernels.host.weights import Quantised
from fastdiff.pipelines import parts

PROMPTS = ["a cat", "a dog and a long prompt, longer than the other one"]
CALL = {"height": 16, "width": 24, "num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "pt"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_weights_in_8_bits_are_near_and_have_the_same_bits_in_any_batch(ours, folder, precision):
    pipe = fastdiff.Pipeline.from_pretrained(folder, device="cpu", precision=precision)
    for model in (pipe.transformer, pipe.text_encoder):
        names = {name for name, each in model.named_modules() if isinstance(each, Quantised)}
        assert any("layers.0." in name for name in names), "its blocks are in 8 bits"
        assert not any(name.startswith(("all_", "t_embedder", "cap_embedder", "modulation")) for name in names)
    together = pipe(PROMPTS, seed=[3, 5], **CALL).images
    exact = ours(PROMPTS, seed=[3, 5], **CALL).images
    error = (together - exact).square().mean().sqrt()
    assert 1e-5 < error < 0.05
    for place, (prompt, seed) in enumerate([(PROMPTS[0], 3), (PROMPTS[0], 5), (PROMPTS[1], 3)]):
        assert torch.equal(pipe(prompt, seed=seed, **CALL).images[0], together[place])


@pytest.mark.parametrize("precision", ["full", "int8"])
def test_parts_take_turns_when_offloaded_and_draw_the_same(folder, precision, monkeypatch):
    turns, on_gpu = [], parts.on_gpu

    @contextmanager
    def noted(models, device):
        turns.append([type(model).__name__ for model in models])
        try:
            with on_gpu(models, device):
                yield
        finally:
            turns.append("away")

    monkeypatch.setattr(parts, "on_gpu", noted)
    pipe = fastdiff.Pipeline.from_pretrained(folder, device="cpu", precision=precision)
    expected = pipe(PROMPTS, seed=3, **CALL).images
    assert not turns
    assert torch.equal(pipe.offloaded_from(torch.device("cpu"))(PROMPTS, seed=3, **CALL).images, expected)
    assert turns == [["Qwen3Model"], "away", ["ZImageTransformer2DModel"], "away", ["AutoencoderKL"], "away"]
