"""ddpm-cifar10-32's U-Net against diffusers' on a GPU: error, memory, and a second GPU."""

import diffusers
import pytest
import torch

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.weights import load_weights
from tests.support.planners import policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
]

DDPM32 = {
    "sample_size": 32,
    "block_out_channels": (128, 256, 256, 256),
    "layers_per_block": 2,
    "attention_head_dim": None,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-6,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
}
HOPPER = policy(32, 64, 128, 256)


@pytest.fixture
def theirs():
    torch.manual_seed(0)
    return diffusers.UNet2DModel(**DDPM32).cuda().eval().requires_grad_(False)


def ours_of(theirs, dtype=torch.float32, device="cuda"):
    with torch.device("meta"):
        ours = fastdiff.UNet2DModel.from_config(DDPM32)
    load_weights(ours, dict(theirs.state_dict()), source="test", dtype=dtype, device=device)
    return ours


def noise(n, dtype=torch.float32, device="cuda"):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def test_float32_is_diffusers(theirs):
    expected = theirs(noise(2), 500).sample
    assert (ours_of(theirs)(noise(2), 500).sample - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_errs_at_most_twice_as_much_as_diffusers(theirs, dtype):
    expected = theirs(noise(2), 500).sample
    error = (ours_of(theirs, dtype)(noise(2, dtype), 500).sample - expected).norm()
    theirs.to(dtype)
    assert error <= 2 * (theirs(noise(2, dtype), 500).sample - expected).norm()


@pytest.mark.parametrize("name", ["emoji64", "emoji64-dit"])
def test_fifty_guided_steps_in_float32(name, guided_loop):
    """The models are trained, because random weights double every rounding error from step to step."""
    pipe = fastdiff.Pipeline.from_pretrained(name, device="cuda", dtype="float32")
    component = pipe.denoiser.part.name
    kind = getattr(diffusers, type(pipe.denoiser).__name__)
    model = kind.from_pretrained(hub.resolve(name) / component, torch_dtype=torch.float32).cuda().eval()
    scheduler = diffusers.DDIMScheduler.from_pretrained(hub.resolve(name) / "scheduler")
    latents = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(7)).cuda()
    options = {"labels": torch.tensor([2, 0]).cuda(), "null_label": pipe.info.null_label, "guidance_scale": 4.0}
    *_, expected = guided_loop(model, scheduler, latents, steps=50, use_clipped_model_output=True, **options)
    pictures = pipe(latents=latents, class_labels=[2, 0], guidance_scale=4.0, num_inference_steps=50, output_type="pt")
    assert (2 * pictures.images - 1 - expected.clamp(-1, 1)).abs().max() <= 3e-3


def test_accelerate_takes_no_memory(theirs):
    """It needs memory for a layer at a time to rearrange weights. A call then needs at most diffusers' memory."""

    def peak(call) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    theirs.bfloat16()
    x = noise(8, torch.bfloat16)
    needed = peak(lambda: theirs(x, 500))
    before = torch.cuda.memory_allocated()
    largest = max(parameter.nbytes for parameter in theirs.parameters())
    stacked = sum(tensor.nbytes for name, tensor in theirs.named_parameters() if "time_emb_proj" in name)
    assert peak(lambda: fastdiff.accelerate(theirs)) <= 2 * max(largest, stacked) + 2**20
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert peak(lambda: theirs(x, 500)) <= needed


def test_an_accelerated_planner_follows_its_parameters_through_graphs():
    """This includes transposed convolutions, whose weights fastdiff stores in another form."""
    torch.manual_seed(0)
    planner = diffusers.UNet1DModel(**HOPPER).cuda().eval().requires_grad_(False)
    x = torch.randn(2, 14, 32, device="cuda")
    fastdiff.accelerate(planner)
    for _ in range(3):  # eager, captured, replayed
        before = planner(x, 7).sample
    planner.up_blocks[0].upsample.conv.weight.data.mul_(1.5)
    after = planner(x, 7).sample
    assert not torch.allclose(after, before, atol=1e-3)
    assert (after - fastdiff.restore(planner)(x, 7).sample).abs().max() <= 1e-4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_gpu_and_a_stream_of_its_own(theirs):
    first = ours_of(theirs, torch.bfloat16)
    for _ in range(2):  # captures a graph on the first device
        expected = first(noise(2, torch.bfloat16), 500).sample
    ours = ours_of(theirs, torch.bfloat16, "cuda:1")
    assert torch.cuda.current_device() == 0
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        for _ in range(3):  # eager, captured, replayed
            output = ours(noise(2, torch.bfloat16, "cuda:1"), 500).sample
            torch.cuda.current_stream("cuda:1").synchronize()
            assert output.device == torch.device("cuda:1")
            assert torch.equal(output.cpu(), expected.cpu())
