"""The little that is read of the config of diffusers' AutoencoderKL."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdiff.errors import InputError


def autoencoder_scale(config: Mapping[str, Any], source: str | Path = "vae") -> int:
    """How many pixels of a picture one latent stands for, in height and in width; of diffusers' AutoencoderKL."""
    widths = config.get("block_out_channels")
    if not isinstance(widths, list | tuple) or not widths:
        raise InputError(f"{source}: block_out_channels is {widths!r}, not a list of widths; save the VAE again")
    return 2 ** (len(widths) - 1)
