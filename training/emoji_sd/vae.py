"""The VAE of emoji-sd: diffusers' AutoencoderKL in several shapes, its folder, and its reconstruction quality."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from training.data import to_bytes, to_model_range
from training.emoji_sd.data import SIZE

BATCH = 64  # pictures per batch without gradients


@dataclass(frozen=True)
class Shape:
    """The channels of each level, finest first, and of the latents. The factor is 2 ** (levels - 1)."""

    channels: tuple[int, ...]
    latents: int

    @property
    def latent_size(self) -> int:
        """The side length of a picture's latents."""
        return SIZE >> (len(self.channels) - 1)


SHAPES = {
    "f8c4": Shape((48, 64, 96, 128), 4),
    "f8c8": Shape((48, 64, 96, 128), 8),
    "f8c16": Shape((48, 64, 96, 128), 16),
    "f4c4": Shape((48, 64, 128), 4),
}


def build_vae(shape: Shape) -> AutoencoderKL:
    levels = len(shape.channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=shape.channels,
        latent_channels=shape.latents,
        layers_per_block=1,
        norm_num_groups=16,
        sample_size=SIZE,
        force_upcast=False,
    )


def save_vae(vae: AutoencoderKL, scaling_factor: float, folder: Path) -> None:
    """Write a VAE in float16 as a diffusers folder, with the factor that gives its latents unit variance."""
    vae = copy.deepcopy(vae).to("cpu", torch.float16).to(memory_format=torch.contiguous_format)
    vae.register_to_config(scaling_factor=scaling_factor)
    vae.save_pretrained(folder)


def load_vae(folder: Path, device: torch.device | str) -> AutoencoderKL:
    """Load a folder of `save_vae` in float32."""
    return AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32).to(device).eval()


@torch.no_grad()
def scaling_factor(vae: AutoencoderKL, images: Tensor) -> float:
    """Return 1 / the standard deviation of all elements of sampled latents of (N, 3, H, W) uint8 pictures."""
    torch.manual_seed(0)
    parts = [vae.encode(to_model_range(part)).latent_dist.sample().double() for part in images.split(BATCH)]
    return 1 / torch.cat(parts).std().item()


@torch.no_grad()
def brought_back(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Encode and decode (N, 3, H, W) uint8 pictures with the mode of their latents; return the same shape, uint8."""
    parts = [vae(to_model_range(part)).sample for part in images.split(BATCH)]
    return torch.cat([to_bytes(part).permute(0, 3, 1, 2) for part in parts]).to(images.device)


def quality(images: Tensor, back: Tensor) -> dict[str, float]:
    """Measure reconstructions `back` of pictures `images`, both (N, 3, H, W) uint8.

    psnr is in dB, pooled over all pictures; psnr_mean is the mean over pictures. sharpness is the mean difference of
    neighbouring pixels over the steepest 5 % of positions, as a share of the originals' (1: equally sharp). flatness is
    that difference where the originals have none, in levels of 255. white is the distance of white pixels from white,
    in levels.
    """
    real, made = images.float(), back.float()
    errors = (real - made).square().mean(dim=(1, 2, 3))
    real_steps, made_steps = (image.diff(dim=-1).abs() for image in (real, made))
    steep = real_steps >= real_steps.flatten().sort().values[int(0.95 * real_steps.numel())]
    white = (real == 255).all(dim=1, keepdim=True).expand_as(real)
    return {
        "psnr": _decibels(errors.mean()).item(),
        "psnr_mean": _decibels(errors).mean().item(),
        "sharpness": (made_steps[steep].mean() / real_steps[steep].mean()).item(),
        "flatness": made_steps[real_steps == 0].mean().item(),
        "white": (255 - made[white]).mean().item(),
    }


def _decibels(squared_error: Tensor) -> Tensor:
    return 10 * torch.log10(255**2 / squared_error.clamp(min=1e-6))
