"""ControlNet pipelines with random weights for each way of running them, with copies of the same weights.

The zero convolutions are random too, as in a trained ControlNet.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import nn

import fastdiff
from benchmarks.pictures import text_folders
from benchmarks.pictures_in import pipelines
from fastdiff.tuning.timing import DEVICE
from fastdiff.verification.peers import compile_diffusers

WIDTHS = 16, 32, 96, 256  # of a ControlNet's condition embedding, for pictures 8 times larger than latents


def sdxl(tokenizer: Any) -> Any:
    return controlled(text_folders.sdxl(tokenizer), count=1)


def sd15(tokenizer: Any) -> Any:
    return controlled(pipelines.sd15(tokenizer), count=2)


pipelines.MODELS |= {"sdxl-control": sdxl, "sd15-two-controls": sd15}


def controlled(pipe: Any, count: int) -> Any:
    """Return diffusers' pipeline of the same parts with `count` ControlNets."""
    nets = [random_controlnet(pipe.unet, pipe.vae_scale_factor) for _ in range(count)]
    return _of_parts(pipe.components | {"controlnet": nets if count > 1 else nets[0]})


def random_controlnet(unet: Any, scale: int) -> Any:
    """Return a ControlNet with the encoder of a U-Net, for pictures `scale` times larger than latents."""
    with DEVICE:
        net = diffusers.ControlNetModel.from_unet(
            unet, conditioning_embedding_out_channels=WIDTHS[: scale.bit_length()]
        )
        zeros = (net.controlnet_cond_embedding.conv_out, *net.controlnet_down_blocks, net.controlnet_mid_block)
        for layer in zeros:
            assert isinstance(layer, nn.Conv2d)
            layer.reset_parameters()
    return net.eval()


def of_diffusers(pipe: Any) -> Any:
    """Return a copy whose U-Net, ControlNets and VAE are channels-last, as diffusers' manual recommends for speed."""
    return _of_parts(pipelines.copies(pipe))


def of_compiled(pipe: Any) -> Any:
    """Return the same, with U-Net and ControlNets that are compiled when they are called."""
    found = of_diffusers(pipe)
    found.unet = compile_diffusers(found.unet)
    found.controlnet = torch.compile(found.controlnet, mode="reduce-overhead", fullgraph=True)
    return found


def of_accelerated(pipe: Any) -> Any:
    return fastdiff.accelerate(of_diffusers(pipe))


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": of_diffusers,
    "fastdiff": pipelines.of_fastdiff,
    "accelerate": of_accelerated,
    "compile": of_compiled,
}


def _of_parts(parts: dict[str, Any]) -> Any:
    parts = {name: part for name, part in parts.items() if name != "image_encoder"}
    kinds = diffusers.StableDiffusionControlNetPipeline, diffusers.StableDiffusionXLControlNetPipeline
    is_xl = "text_encoder_2" in parts
    unused = {"add_watermarker": False} if is_xl else {"requires_safety_checker": False}
    pipe: Any = kinds[is_xl](**parts, **unused)
    pipe.set_progress_bar_config(disable=True)
    return pipe
