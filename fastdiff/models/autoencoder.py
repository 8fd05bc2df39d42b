"""Latents to pictures: diffusers' AutoencoderKL, of its extra."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.execution.cpu_workers import map_pictures
from fastdiff.extras import import_diffusers

Autoencoder = Any  # diffusers' AutoencoderKL, of an extra that may not be installed


def load_autoencoder(folder: Path, *, variant: str | None, dtype: torch.dtype, device: torch.device) -> Autoencoder:
    """Load diffusers' AutoencoderKL of a component folder. InputError where diffusers or the weights are missing."""
    diffusers = import_diffusers(f"the VAE of {folder.parent}")
    try:
        vae = diffusers.AutoencoderKL.from_pretrained(
            folder, variant=variant, torch_dtype=dtype, low_cpu_mem_usage=False, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{folder} cannot be loaded by diffusers ({reason}); download or save it again") from None
    return vae.to(device).eval().requires_grad_(False)


def decode_latents(vae: Autoencoder, latents: Tensor) -> Tensor:
    """Return pictures (N, H, W, 3) float32, about in [-1, 1], of latents (N, h, w, C) float32.

    As diffusers' DiTPipeline, but each picture alone: its bits must not depend on its batch.
    """

    @torch.no_grad()
    def decode(latent: Tensor) -> Tensor:
        scaled = (latent / vae.config.scaling_factor).to(vae.dtype).permute(0, 3, 1, 2)
        return vae.decode(scaled).sample.float().permute(0, 2, 3, 1)

    return torch.cat(tuple(map_pictures(decode, latents)))
