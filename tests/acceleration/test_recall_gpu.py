"""accelerate keeps the conditioning between the steps of a loop on a GPU: equal bits, CUDA graphs, no waiting."""

import pytest
import torch

import fastdiff
from tests.support.text_pipelines import tiny_unet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def unet(request):
    return fastdiff.accelerate(tiny_unet("sdxl").to("cuda", request.param))


def inputs(unet, seed=0):
    torch.manual_seed(seed)
    sample, text, embeds = (torch.randn(2, *shape, device="cuda") for shape in ((4, 8, 8), (5, 72), (24,)))
    added = {"text_embeds": embeds.to(unet.dtype), "time_ids": torch.tensor([[16.0, 16, 0, 0, 16, 16]] * 2).cuda()}
    return sample.to(unet.dtype), {"encoder_hidden_states": text.to(unet.dtype), "added_cond_kwargs": added}


def ours_of(model):
    return model.forward.__self__.ours()


def single_calls(unet, sample, timesteps, given):
    """Return what our model predicts when it is called on its own."""
    ours = ours_of(unet)
    ours.recall, kept = None, ours.recall
    outputs = [ours(sample, t, **given).sample for t in timesteps]
    ours.recall = kept
    return outputs


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_step_has_the_bits_of_a_single_call(unet, device):
    timesteps = torch.arange(980, 0, -20, device=device)
    sample, given = inputs(unet)
    expected = single_calls(unet, sample, timesteps, given)
    for _ in range(2):
        assert all(
            torch.equal(unet(sample, t, **given).sample, each) for t, each in zip(timesteps, expected, strict=True)
        )
    assert set(ours_of(unet)._graphs) == {"forward", "step"}  # a graph for the single calls, and one for all steps
    assert ours_of(unet).recall._runs


def test_graphs_follow_prompts_and_weights(unet):
    timesteps = torch.arange(980, 0, -20, device="cuda")
    sample, given = inputs(unet)
    weight = unet.get_parameter("mid_block.attentions.0.transformer_blocks.0.attn2.to_v.weight")
    for i, t in enumerate(timesteps[:12]):
        if i == 5:
            given["encoder_hidden_states"].mul_(-1)
        if i == 7:
            weight.mul_(2)
        if i == 9:
            weight.data = weight.data / 2
        if i == 10:
            given = inputs(unet, seed=1)[1]
        assert torch.equal(unet(sample, t, **given).sample, single_calls(unet, sample, [t], given)[0]), i


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_gpu(unet, device):
    timesteps = torch.arange(980, 0, -20, device=device)
    for seed in range(3):  # eager, captured, replayed
        sample, given = inputs(unet, seed)
        torch.cuda.set_sync_debug_mode("error" if seed == 2 else "default")
        try:
            for t in timesteps:
                unet(sample, t, **given)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_stream_of_its_own(unet):
    timesteps = torch.arange(980, 0, -20, device="cuda")
    sample, given = inputs(unet)
    expected = single_calls(unet, sample, timesteps, given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for i, t in enumerate(timesteps):
        with torch.cuda.stream(stream if i % 2 else torch.cuda.current_stream()):
            found = unet(sample, t, **given).sample
        torch.cuda.synchronize()
        assert torch.equal(found, expected[i])
    assert len(ours_of(unet).recall._runs) == 2
