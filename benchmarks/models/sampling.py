"""Whole pictures (50 DDIM steps) and trajectories (20): our pipeline, and a loop over diffusers' model."""

from typing import Any

import diffusers
import torch
from torch import Tensor

import fastdiff

STEPS, PLAN_STEPS = 50, 20
SCHEDULER = {"clip_sample": True, "timestep_spacing": "leading"}


def sample(ours: fastdiff.UNet2DModel, noise: Tensor, labels: Tensor | None) -> Tensor:
    """noise (N, C, H, W) -> pictures (N, C, H, W) in [0, 1]."""
    pipe = fastdiff.LabelPipeline(ours, fastdiff.DDIMScheduler(**SCHEDULER))
    return pipe(latents=noise, class_labels=labels, num_inference_steps=STEPS, output_type="pt").images


def loop(theirs: torch.nn.Module, noise: Tensor, labels: Tensor | None) -> Tensor:
    """Do the same as `sample` with diffusers' model, in the dtype of model and noise, as diffusers' pipeline does."""
    return (_denoise(theirs, noise, STEPS, labels).float() / 2 + 0.5).clamp(0, 1)


def plan(ours: fastdiff.UNet1DModel, noise: Tensor) -> Tensor:
    """noise (N, C, L) -> trajectories (N, C, L)."""
    pipe = fastdiff.TrajectoryPipeline(ours, fastdiff.DDIMScheduler(**SCHEDULER))
    return pipe(latents=noise, num_inference_steps=PLAN_STEPS, output_type="pt").trajectories


def plan_loop(theirs: torch.nn.Module, noise: Tensor) -> Tensor:
    """Do the same as `plan` with diffusers' model, in the dtype of model and noise."""
    return _denoise(theirs, noise, PLAN_STEPS)


def _denoise(theirs: torch.nn.Module, x: Tensor, steps: int, *labels: Tensor | None) -> Tensor:
    scheduler: Any = diffusers.DDIMScheduler(**SCHEDULER)
    scheduler.set_timesteps(steps, device=x.device)
    for t in scheduler.timesteps:
        x = scheduler.step(theirs(x, t.expand(len(x)), *labels).sample, t, x).prev_sample
    return x
