"""Draw pictures of many prompts with diffusers' own StableDiffusionPipeline."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
)
from torch import Tensor

BATCH = 512  # pictures per batch, each with and without its prompt
SAMPLERS = {  # by fastdiff's names
    "dpm++2m": DPMSolverMultistepScheduler,
    "ddim": DDIMScheduler,
    "euler": EulerDiscreteScheduler,
}


def load_pipeline(folder: Path, device: torch.device | str) -> StableDiffusionPipeline:
    """Load the folder's pipeline in float32, without a progress bar."""
    options = {"dtype": torch.float32, "low_cpu_mem_usage": False}
    pipeline = StableDiffusionPipeline.from_pretrained(folder, **options).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(
    pipeline: StableDiffusionPipeline,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    guidance_scale: float,
    num_inference_steps: int,
    sampler: str = "dpm++2m",
    control: Tensor | None = None,
    control_scale: float = 1.0,
) -> Tensor:
    """Draw a picture per (prompt, seed), noise from the seed's CPU generator: (N, 3, 128, 128) uint8 on the CPU.

    control: for a pipeline with a ControlNet, the control pictures (N, 3, 128, 128) uint8, and how much they count.
    """
    config = {key: value for key, value in pipeline.scheduler.config.items() if key != "clip_sample"}
    pipeline.scheduler = SAMPLERS[sampler].from_config(config, **({"clip_sample": False} if sampler == "ddim" else {}))
    options = {"guidance_scale": guidance_scale, "num_inference_steps": num_inference_steps, "output_type": "pt"}
    parts = []
    for start in range(0, len(prompts), BATCH):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds[start:][:BATCH]]
        if control is not None:
            options |= {"image": control[start:][:BATCH].float() / 255, "controlnet_conditioning_scale": control_scale}
        drawn = pipeline(list(prompts[start:][:BATCH]), generator=generators, **options).images
        parts.append((255 * drawn.float()).round().clamp(0, 255).byte().cpu())
    return torch.cat(parts)
