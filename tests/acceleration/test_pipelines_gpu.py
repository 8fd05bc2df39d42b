"""accelerate on live pipelines on a GPU: 16 bits, CUDA graphs with callbacks, memory and offload."""

import gc

import pytest
import torch

import fastdiff
from tests.support.text_pipelines import KINDS, text_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
    pytest.mark.filterwarnings("ignore:`upcast_vae` is deprecated"),
]


@pytest.fixture(params=KINDS)
def pipe(request):
    return text_pipeline(request.param).to("cuda")


def draw(pipe, **options):
    given = {"prompt": ["a photo of the cat", "astronaut riding"], "num_inference_steps": 8, "output_type": "pt"}
    return pipe(**given | options, generator=torch.Generator().manual_seed(3)).images.float()


def test_float32(pipe):
    latents, pictures = draw(pipe, output_type="latent"), draw(pipe)
    fastdiff.accelerate(pipe)
    for _ in range(2):  # the second run uses CUDA graphs from its first step
        assert (draw(pipe, output_type="latent") - latents).abs().max() <= 1e-4 * latents.abs().max()
        assert (draw(pipe) - pictures).abs().max() <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_error_of_16_bits_is_diffusers(pipe, dtype):
    exact = draw(pipe)
    theirs = draw(pipe.to(dtype))
    ours = draw(fastdiff.accelerate(pipe))
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
    assert pipe.vae.dtype == pipe.unet.dtype == dtype


def edit(pipe, step, t, tensors):
    tensors["prompt_embeds"].mul_(-1)
    return {}


def replace(pipe, step, t, tensors):
    return {"prompt_embeds": tensors["prompt_embeds"].flip(-1), "latents": tensors["latents"].flip(-1)}


def less_guidance(pipe, step, t, tensors):
    """End guidance midway, which halves the U-Net's batch."""
    if step == 4:
        pipe._guidance_scale = 0.0
        return {name: tensors[name].chunk(2)[1] for name in tensors if name != "latents"}
    return {}


@pytest.mark.parametrize("callback", [edit, replace, less_guidance], ids=lambda each: each.__name__)
def test_graphs_follow_callbacks(pipe, callback):
    names = ["latents", "prompt_embeds"]
    if "XL" in type(pipe).__name__:
        names += ["add_text_embeds", "add_time_ids"]
    given = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": names}
    plain, changed = draw(pipe), draw(pipe, **given)
    assert (changed - plain).abs().max() > 1e-2
    fastdiff.accelerate(pipe)
    for _ in range(2):
        assert (draw(pipe, **given) - changed).abs().max() <= 1e-3
    assert pipe.unet.forward.__self__.ours()._graphs


def test_what_leaves_the_gpu_frees_its_memory(pipe):
    draw(fastdiff.accelerate(pipe))
    pipe.to("cpu")
    gc.collect()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated()
    weights = sum(parameter.nbytes for part in (pipe.unet, pipe.vae) for parameter in part.parameters())
    pipe.to("cuda")
    draw(pipe)
    assert torch.cuda.memory_allocated() >= left + weights
    pipe.to("cpu")
    gc.collect()
    assert torch.cuda.memory_allocated() <= left


@pytest.mark.parametrize("when", ["before", "after"])
def test_offload_of_whole_models(pipe, when):
    pytest.importorskip("accelerate")
    expected = draw(pipe)
    if when == "before":
        pipe.enable_model_cpu_offload()
        fastdiff.accelerate(pipe)
    else:
        fastdiff.accelerate(pipe)
        pipe.enable_model_cpu_offload()
    for _ in range(2):
        assert (draw(pipe) - expected).abs().max() <= 1e-3
        assert pipe.unet.device.type == "cpu"
    pipe.remove_all_hooks()
    fastdiff.restore(pipe).to("cuda")
    assert (draw(pipe) - expected).abs().max() <= 1e-3
