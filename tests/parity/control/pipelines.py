"""Tiny pipelines of diffusers with ControlNets, and ours with the same weights."""

from typing import Any

import diffusers

from tests.parity.image_starts.pictures import of_same_parts
from tests.support.text_pipelines import tiny_controlnet

KINDS = {  # what a run starts from -> kind of model -> diffusers' pipeline
    "text": {
        "sd1": diffusers.StableDiffusionControlNetPipeline,
        "sd2": diffusers.StableDiffusionControlNetPipeline,
        "sdxl": diffusers.StableDiffusionXLControlNetPipeline,
    },
    "image": {
        "sd1": diffusers.StableDiffusionControlNetImg2ImgPipeline,
        "sd2": diffusers.StableDiffusionControlNetImg2ImgPipeline,
        "sdxl": diffusers.StableDiffusionXLControlNetImg2ImgPipeline,
    },
    "mask": {
        "sd1": diffusers.StableDiffusionControlNetInpaintPipeline,
        "sd2": diffusers.StableDiffusionControlNetInpaintPipeline,
        "sdxl": diffusers.StableDiffusionXLControlNetInpaintPipeline,
    },
}


def controlled(start: str, kind: str, pipes: Any, count: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return diffusers' pipeline with `count` ControlNets and ours.

    pipes: diffusers' pipeline of a kind without ControlNets and ours. `options` change the ControlNets' config.
    """
    theirs, ours = pipes
    nets = [tiny_controlnet(kind, seed=4 + i, **options) for i in range(count)]
    given = nets[0] if count == 1 else nets
    return of_same_parts(KINDS[start], kind, theirs, controlnet=given), ours.with_parts(controlnet=given)
