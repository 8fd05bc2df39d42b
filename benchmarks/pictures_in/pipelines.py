"""Pipelines with random weights for each way of running them: fastdiff, and diffusers eager and under torch.compile.

All ways of a model have copies of the same weights.
"""

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

import fastdiff
from benchmarks.models import stable_diffusion as sd
from benchmarks.pictures import text_folders
from fastdiff.pipelines.parts import adopted
from fastdiff.verification.peers import compile_diffusers

_UNET = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "transformer_layers_per_block": 1,
    "cross_attention_dim": 8,
    "sample_size": 16,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_VAE = {
    "block_out_channels": (4, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
    "sample_size": 32,
}
_TEXT = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
TINY = {  # by the names of `stable_diffusion`
    "SD15": _UNET,
    "SD15_VAE": _VAE,
    "SD15_TEXT": _TEXT,
    "SDXL": _UNET
    | {"cross_attention_dim": 16, "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 8 + 6 * 4},
    "SDXL_VAE": _VAE,
    "SDXL_TEXT_2": _TEXT | {"projection_dim": 8},
}

_DDIM = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}


class Theirs(NamedTuple):
    """Pipelines of diffusers that share their parts."""

    text_to_image: Any
    image_to_image: Any
    inpaint: Any


def use_tiny_configs() -> None:
    """Replace the configs of Stable Diffusion by tiny ones, until the process ends."""
    for name, config in TINY.items():
        setattr(sd, name, getattr(sd, name) | config)


@torch.no_grad()
def random_pipeline(name: str, dtype: torch.dtype) -> Any:
    """Return diffusers' text-to-image pipeline of MODELS, which the ways copy."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        return MODELS[name](text_folders.save_tokenizer(Path(folder, "bytes"))).to(dtype)


def sd15(tokenizer: Any) -> Any:
    """Return Stable Diffusion 1.5 with DDIM, which takes as many steps as it is told."""
    pipe = text_folders.sd15(tokenizer)
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config, **_DDIM)
    return pipe


MODELS: dict[str, Callable[[Any], Any]] = {"sd15": sd15, "sdxl-inpainting": partial(text_folders.sdxl, in_channels=9)}


def of_fastdiff(pipe: Any) -> fastdiff.TextToImagePipeline:
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    return fastdiff.TextToImagePipeline(**{name: adopted(name, part) for name, part in parts.items()})


def of_diffusers(pipe: Any) -> Theirs:
    """Return copies whose U-Net and VAE are channels-last, as diffusers' manual recommends for speed."""
    return _sharing(copies(pipe))


def of_compiled(pipe: Any) -> Theirs:
    """Return the same, with a U-Net that is compiled when it is called."""
    parts = copies(pipe)
    return _sharing(parts | {"unet": compile_diffusers(parts["unet"])})


WAYS: dict[str, Callable[[Any], Any]] = {"eager": of_diffusers, "fastdiff": of_fastdiff, "compile": of_compiled}


def copies(pipe: Any) -> dict[str, Any]:
    """Return copies of all parts. The models of a step and the VAE are channels-last."""
    parts = {name: copy.deepcopy(part) for name, part in pipe.components.items()}
    for name in parts.keys() & {"unet", "vae", "controlnet"}:
        parts[name].to(memory_format=torch.channels_last)
    return parts


def _sharing(parts: dict[str, Any]) -> Theirs:
    if "text_encoder_2" in parts:
        prefix, options = "StableDiffusionXL", {"add_watermarker": False}
    else:
        prefix, options = "StableDiffusion", {"requires_safety_checker": False}
    kinds = (getattr(diffusers, f"{prefix}{kind}Pipeline") for kind in ("", "Img2Img", "Inpaint"))
    pipes = Theirs(*(kind(**parts, **options) for kind in kinds))
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    return pipes
