"""ZImageTransformer2DModel on a GPU: the error against float32 on the CPU, and bits in any batch."""

import copy

import pytest
import torch
from torch import nn

from fastdiff import ZImageTransformer2DModel
from fastdiff.models.blocks.conditioning import Conditioning, Prompt

pytestmark = pytest.mark.gpu

OPTIONS = {"dim": 384, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 3, "cap_feat_dim": 64}
CALLS = (((16, 24), 5), ((16, 24), 40), ((8, 32), 5), ((16, 24), 9), ((64, 64), 70))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    ours = ZImageTransformer2DModel.from_config(OPTIONS)
    for token in (ours.x_pad_token, ours.cap_pad_token):
        token.normal_()
    return ours


def inputs(dtype):
    generator = torch.Generator().manual_seed(1)
    latents = [torch.randn(16, 1, *size, generator=generator).to("cuda", dtype) for size, _ in CALLS]
    captions = [torch.randn(length, 64, generator=generator).to("cuda", dtype) for _, length in CALLS]
    return latents, torch.rand(len(CALLS), generator=generator).cuda(), captions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_same_bits_in_any_batch(model, dtype):
    ours = copy.deepcopy(model).to("cuda", dtype)
    latents, times, captions = inputs(dtype)
    alone = [ours([x], t[None], [c]).sample[0] for x, t, c in zip(latents, times, captions, strict=True)]
    for order in ([0, 1, 2, 3, 4], [4, 3, 0], [0, 0, 3, 3], [1]):
        for _ in range(3):  # run, captured, replayed
            made = ours([latents[i] for i in order], times[order], [captions[i] for i in order]).sample
            assert all(torch.equal(each, alone[i]) for i, each in zip(order, made, strict=True))


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)],
    ids=["fp32", "fp16", "bf16"],
)
def test_near_float32_on_the_cpu(model, dtype, allowed, exact_matmuls):
    latents, times, captions = inputs(dtype)
    expected = model([each.cpu().float() for each in latents], times.cpu(), [each.cpu().float() for each in captions])
    made = copy.deepcopy(model).to("cuda", dtype)(latents, times, captions)
    for own, true in zip(made.sample, expected.sample, strict=True):
        assert (own.cpu().float() - true).norm() < allowed * true.norm()


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"])
def test_captions_of_two_lengths_run_in_one_step(model, dtype, allowed, exact_matmuls):
    """As in a guided step. A picture has its bits at any place, and is near its own forward."""
    ours = copy.deepcopy(model).to("cuda", dtype)
    latents, _, captions = ([*each[:2]] if isinstance(each, list) else each for each in inputs(dtype))
    x = torch.stack(latents)[:, :, 0].permute(0, 2, 3, 1).contiguous()
    temb, timesteps = ours.embed(torch.full((2,), 700.0, device="cuda")), torch.full((2,), 700.0, device="cuda")

    def predict(order):
        chosen = [captions[i] for i in order]
        lengths = torch.tensor([len(each) for each in chosen])
        prompt = Prompt(
            nn.utils.rnn.pad_sequence(chosen, batch_first=True), added=(lengths, torch.tensor([[16, 24]] * 2))
        )
        return ours.predict(x[order], Conditioning(temb, timesteps, ours.project(prompt)))

    made = predict([0, 1])
    assert torch.equal(predict([1, 0]), made.flip(0))
    expected = ours(latents, 0.3, captions).sample
    for own, other in zip(made.permute(0, 3, 1, 2), expected, strict=True):
        assert (own + other[:, 0]).float().norm() < allowed * other.float().norm()
