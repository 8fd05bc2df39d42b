"""A forward of the measured models: how ours is built of a config, and what it is given."""

import torch
from harness import DEVICE
from shapes import MODELS_CPU, MODELS_GPU
from torch import Tensor, nn

import fastdiff

GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
WORKLOADS = MODELS_GPU if GPU else MODELS_CPU


def class_name(config: dict) -> str:
    """The name of the model's class, in diffusers and here."""
    return "DiTTransformer2DModel" if "patch_size" in config else "UNet2DModel"


def random_model(config: dict) -> nn.Module:
    """Our model with the same random weights in every run, in DTYPE on DEVICE."""
    torch.manual_seed(0)
    with DEVICE:  # random numbers of a large model take the CPU long
        return getattr(fastdiff, class_name(config)).from_config(config).to(DTYPE)


def inputs(config: dict, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample (N, C, H, W) float32, timesteps (N,), and labels (N,) for a model that takes them."""
    side, labelled = config["sample_size"], config.keys() & {"num_class_embeds", "num_embeds_ada_norm"}
    sample = torch.randn(batch, config.get("in_channels", 3), side, side, device=DEVICE)
    labels = torch.zeros(batch, dtype=torch.int64, device=DEVICE) if labelled else None
    return sample, torch.full((batch,), 500, device=DEVICE), labels
