"""A tiny U-Net of random weights, saved as diffusers saves a pipeline."""

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
    """Save one of these options as a DDIM pipeline; returns the folder."""
    import diffusers
    import torch

    generator = torch.Generator().manual_seed(0)
    unet = diffusers.UNet2DModel(**options)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator) + (parameter == 1))
    diffusers.DDIMPipeline(unet=unet, scheduler=diffusers.DDIMScheduler()).save_pretrained(folder)
    return folder
