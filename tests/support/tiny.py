"""Tiny networks with random weights, saved as diffusers pipelines."""

import json
import shutil
from pathlib import Path

UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


def save_unet(folder: Path, **options) -> Path:
    """Save a U-Net with these options as a DDIM pipeline. Return the folder."""
    import diffusers
    import torch

    generator = torch.Generator().manual_seed(0)
    unet = diffusers.UNet2DModel(**options)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator) + (parameter == 1))
    diffusers.DDIMPipeline(unet=unet, scheduler=diffusers.DDIMScheduler()).save_pretrained(folder)
    return folder


CLASS_MODELS = {  # small versions of the bundled models' networks
    "emoji64": (
        "unet",
        "UNet2DModel",
        {
            "block_out_channels": (8,) * 4,  # multiples of 8 pixels, as for the bundled model
            "down_block_types": ("DownBlock2D",) * 4,
            "up_block_types": ("UpBlock2D",) * 4,
            "norm_num_groups": 4,
            "layers_per_block": 1,
            "add_attention": False,
        },
    ),
    "emoji64-dit": (
        "transformer",
        "DiTTransformer2DModel",
        {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 16},
    ),
}


def save_small_bundled(folder: Path) -> Path:
    """Fill a folder with the bundled models. Class-conditional models get small networks with random weights."""
    import diffusers
    import torch

    from fastdiff.checkpoints import hub

    for name, bundled in hub.bundled_models().items():
        if name not in CLASS_MODELS:
            (folder / name).symlink_to(bundled, target_is_directory=True)
            continue
        part, kind, options = CLASS_MODELS[name]
        shutil.copytree(bundled, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = json.loads((bundled / part / "config.json").read_text())
            getattr(diffusers, kind).from_config(config | options).save_pretrained(folder / name / part)
    return folder
