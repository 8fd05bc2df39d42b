"""diffusers' pipelines that start from a picture, and pictures for them."""

from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

IMAGE_TO_IMAGE = {
    "sd1": diffusers.StableDiffusionImg2ImgPipeline,
    "sd2": diffusers.StableDiffusionImg2ImgPipeline,
    "sdxl": diffusers.StableDiffusionXLImg2ImgPipeline,
}
INPAINTING = {
    "sd1": diffusers.StableDiffusionInpaintPipeline,
    "sd2": diffusers.StableDiffusionInpaintPipeline,
    "sdxl": diffusers.StableDiffusionXLInpaintPipeline,
}


PLAIN, WITH_CHANNELS = 4, 9  # input channels of U-Nets that inpaint


def of_same_parts(kinds: dict[str, type], kind: str, theirs: Any, **parts: Any) -> Any:
    """Return a pipeline of diffusers with the parts of another one."""
    unused = {"requires_safety_checker": False} if kind != "sdxl" else {"add_watermarker": False}
    pipe = kinds[kind](**theirs.components | parts, **unused)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(seed: int = 0, width: int = 20, height: int = 16) -> Image.Image:
    """Return a picture of smooth random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)


def mask(seed: int = 0, width: int = 20, height: int = 16) -> Image.Image:
    """Return a mask of smooth random greys."""
    greys = np.random.default_rng(100 + seed).integers(0, 256, (3, 3), dtype=np.uint8)
    return Image.fromarray(greys).resize((width, height), Image.Resampling.BICUBIC)


def as_array(image: Image.Image) -> np.ndarray:
    """Return a picture as diffusers' pipelines take it: (H, W, 3) float32 in [0, 1]."""
    return np.asarray(image, dtype=np.float32) / 255


def as_tensor(image: Image.Image) -> torch.Tensor:
    """Return a picture as (3, H, W) float32 in [0, 1]."""
    return torch.from_numpy(as_array(image)).permute(2, 0, 1)
