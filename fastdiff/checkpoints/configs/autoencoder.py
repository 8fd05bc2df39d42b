"""The little that is read of the config of diffusers' AutoencoderKL."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdiff.checkpoints.configs.denoiser import check_most
from fastdiff.checkpoints.limits import MAX_CHANNELS, MAX_LEVELS, MAX_STAGE_LAYERS
from fastdiff.errors import InputError


def autoencoder_scale(config: Mapping[str, Any], source: str | Path = "vae") -> int:
    """How many pixels of a picture one latent stands for, in height and in width; of diffusers' AutoencoderKL."""
    widths = config.get("block_out_channels")
    if not isinstance(widths, list | tuple) or not widths:
        raise InputError(f"{source}: block_out_channels is {widths!r}, not a list of widths; save the VAE again")
    _check_cost(config, widths, source)
    return 2 ** (len(widths) - 1)


def _check_cost(config: Mapping[str, Any], widths: list | tuple, source: str | Path) -> None:
    """InputError naming an option with which diffusers would build without end."""
    channels = ("in_channels", "out_channels", "latent_channels")
    sizes: dict[str, Any] = {name: config.get(name) for name in channels}
    sizes |= {f"block_out_channels[{i}]": width for i, width in enumerate(widths)}
    costs: list[tuple[dict[str, Any], int]] = [
        ({"block_out_channels: its length": len(widths)}, MAX_LEVELS),
        ({"layers_per_block": config.get("layers_per_block")}, MAX_STAGE_LAYERS),
        (sizes, MAX_CHANNELS),
    ]
    for counts, most in costs:
        check_most({f"{source}: {name}": count for name, count in counts.items()}, most)
