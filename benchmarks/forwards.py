"""A forward of the measured models: how ours is built of a config, and what it is given."""

from typing import Any

import torch
from harness import DEVICE
from shapes import MODELS_CPU, MODELS_GPU
from torch import nn

import fastdiff

GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32  # where a workload does not name another
WORKLOADS = MODELS_GPU if GPU else MODELS_CPU


def is_planner(config: dict) -> bool:
    """Whether the model's samples are of one dimension."""
    return "mid_block_type" in config


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a workload is measured in."""
    return torch.float32 if name.endswith("_fp32") else DTYPE


def class_name(config: dict) -> str:
    """The name of the model's class, in diffusers and here."""
    if is_planner(config):
        return "UNet1DModel"
    return "DiTTransformer2DModel" if "patch_size" in config else "UNet2DModel"


def random_model(config: dict, dtype: torch.dtype) -> nn.Module:
    """Our model with the same random weights in every run, on DEVICE."""
    torch.manual_seed(0)
    with DEVICE:  # random numbers of a large model take the CPU long
        return getattr(fastdiff, class_name(config)).from_config(config).to(dtype)


def inputs(config: dict, batch: int) -> tuple[Any, ...]:
    """Sample (N, C, H, W) or (N, C, L) float32, timesteps (N,); of pictures labels (N,), or None."""
    timesteps = torch.full((batch,), 500, device=DEVICE)
    if is_planner(config):
        return torch.randn(batch, config["in_channels"], config["sample_size"], device=DEVICE), timesteps
    side, labelled = config["sample_size"], config.keys() & {"num_class_embeds", "num_embeds_ada_norm"}
    sample = torch.randn(batch, config.get("in_channels", 3), side, side, device=DEVICE)
    labels = torch.zeros(batch, dtype=torch.int64, device=DEVICE) if labelled else None
    return sample, timesteps, labels
