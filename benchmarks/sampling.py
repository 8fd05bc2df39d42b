"""Whole pictures, 50 DDIM steps: our pipeline, and a loop over diffusers' model by diffusers' scheduler."""

from typing import Any

import diffusers
import torch
from torch import Tensor

import fastdiff

STEPS = 50
SCHEDULER = {"clip_sample": True, "timestep_spacing": "leading"}


def sample(ours: fastdiff.UNet2DModel, noise: Tensor, labels: Tensor | None) -> Tensor:
    """noise (N, C, H, W) -> pictures (N, C, H, W) in [0, 1]."""
    pipe = fastdiff.Pipeline(ours, fastdiff.DDIMScheduler(**SCHEDULER))
    return pipe(latents=noise, class_labels=labels, num_inference_steps=STEPS, output_type="pt").images


def loop(theirs: torch.nn.Module, noise: Tensor, labels: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`sample` of diffusers, in the dtype of its model, as its pipeline does."""
    scheduler: Any = diffusers.DDIMScheduler(**SCHEDULER)
    scheduler.set_timesteps(STEPS, device=noise.device)
    x = noise.to(dtype)
    for t in scheduler.timesteps:
        x = scheduler.step(theirs(x, t.expand(len(x)), labels).sample, t, x).prev_sample
    return (x.float() / 2 + 0.5).clamp(0, 1)
