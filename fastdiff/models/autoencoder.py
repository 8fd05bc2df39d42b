"""Latents to pictures: diffusers' AutoencoderKL, of its extra."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.checkpoints import weights
from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.errors import InputError, in_one_line
from fastdiff.execution.cpu_workers import map_pictures
from fastdiff.extras import import_diffusers

Autoencoder = Any  # diffusers' AutoencoderKL, of an extra that may not be installed


def load_autoencoder(folder: Path, *, variant: str | None, dtype: torch.dtype, device: torch.device) -> Autoencoder:
    """Build diffusers' AutoencoderKL of a component folder's config, and give it the folder's weights strictly.

    diffusers' own loader would draw what is missing at random and drop what is left over. Raises as `load_weights`, and
    InputError where diffusers is missing or can make nothing of the config.
    """
    diffusers = import_diffusers(f"the VAE of {folder.parent}")
    path = folder / "config.json"
    config = read_json(path)
    AutoencoderKLConfig.from_mapping(config, path)
    try:
        with torch.device("meta"):
            vae = diffusers.AutoencoderKL.from_config(config)
    except Exception as error:  # diffusers checks no option: a wrong one fails wherever it is used
        raise InputError(
            f"{path}: diffusers builds no AutoencoderKL from it ({in_one_line(error)}); save the VAE again"
        ) from None
    state = weights.load_state_dict(folder, variant)
    # diffusers' layout: another one would change the bits
    layout = torch.contiguous_format
    weights.load_weights(vae, state, source=folder, dtype=dtype, device=device, layout=layout)
    return vae.eval()


def decode_latents(vae: Autoencoder, latents: Tensor) -> Tensor:
    """Return pictures (N, H, W, 3) float32, about in [-1, 1], of latents (N, h, w, C) float32.

    As diffusers' DiTPipeline, but each picture alone: its bits must not depend on its batch.
    """

    @torch.no_grad()
    def decode(latent: Tensor) -> Tensor:
        scaled = (latent / vae.config.scaling_factor).to(vae.dtype).permute(0, 3, 1, 2)
        return vae.decode(scaled).sample.float().permute(0, 2, 3, 1)

    return torch.cat(tuple(map_pictures(decode, latents)))
