"""accelerate on live T2I-Adapter pipelines: our U-Net reads the residuals of diffusers' adapter."""

import diffusers
import pytest
import torch

import fastdiff
from tests.parity.image_starts.pictures import picture
from tests.support.text_pipelines import text_pipeline, tiny_unet

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # diffusers
CONTROL = picture(5, width=16)
LIKE_SDXL = {
    "block_out_channels": (16, 32, 32),
    "attention_head_dim": (2, 4, 4),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 1),
}


def live(kind, count=1):
    """Return a live pipeline with T2I-Adapters, whose residuals fit the tiny U-Nets."""
    options = {"channels": (16, 32), "downscale_factor": 2, "adapter_type": "full_adapter"}
    unet = tiny_unet(kind)
    if kind == "sdxl":  # three blocks, and a residual for the middle
        options = {"channels": (16, 32, 32, 32), "downscale_factor": 4, "adapter_type": "full_adapter_xl"}
        unet = tiny_unet(kind, **LIKE_SDXL)
    adapters = []
    for i in range(count):
        torch.manual_seed(i)
        adapters.append(diffusers.T2IAdapter(**options, num_res_blocks=1).eval())
    parts = text_pipeline(kind, unet=unet).components | {"adapter": adapters[0] if count == 1 else adapters}
    if kind == "sdxl":
        pipe = diffusers.StableDiffusionXLAdapterPipeline(**parts)
    else:
        del parts["image_encoder"]
        pipe = diffusers.StableDiffusionAdapterPipeline(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, **options):
    given = {"prompt": "a photo of the cat", "num_inference_steps": 4, "output_type": "latent", "image": CONTROL}
    given |= {"height": 16, "width": 16}
    return pipe(**given | options, generator=torch.Generator().manual_seed(3)).images


@pytest.mark.parametrize(
    ("kind", "count", "options"),
    [
        pytest.param("sd1", 1, {}, marks=pytest.mark.slow),
        ("sd1", 2, {"image": [CONTROL, picture(6, width=16)], "adapter_conditioning_scale": [0.4, 0.9]}),
        pytest.param("sdxl", 1, {"adapter_conditioning_scale": 0.7}, marks=pytest.mark.slow),
        ("sdxl", 1, {"adapter_conditioning_factor": 0.5}),
    ],
    ids=["sd1", "sd1-two", "sdxl", "sdxl-factor"],
)
def test_latents_are_those_of_diffusers(kind, count, options):
    pipe = live(kind, count)
    expected = draw(pipe, **options)
    other = draw(pipe, **options | {"adapter_conditioning_scale": [0.0] * count if count > 1 else 0.0})
    assert (other - expected).abs().max() > 1e-2
    fastdiff.accelerate(pipe)
    assert "forward" in vars(pipe.unet) and "forward" not in vars(pipe.adapter)
    for _ in range(2):
        assert (draw(pipe, **options) - expected).abs().max() <= 1e-4 * expected.abs().max()
    ours = pipe.unet.forward.__self__.ours()
    programs = 2 if "adapter_conditioning_factor" in options else 1  # steps with and without residuals
    assert sum(len(each._programs) for each in ours._graphs.values()) == programs
