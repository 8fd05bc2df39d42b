"""Convert tensors to pictures: PIL images, numpy or torch. A VAE decodes latents first."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fastdiff.diffusion.shared_steps import AskedDecode, done
from fastdiff.errors import InputError, NonFiniteError
from fastdiff.execution.transfers import fetch
from fastdiff.models.blocks.protocols import DecoderLike

OutputType = Literal["pil", "np", "pt"]
LATENT = "latent"  # an output type of pipelines with a VAE: the denoiser's result, not decoded
MOST_CHANNELS = 4  # PIL's limit: red, green, blue and alpha


def decode(x: Tensor, output_type: str, vae: DecoderLike | None = None) -> Any:
    """Return x_0 (N, H, W, C) in [-1, 1] as PIL images, numpy (N, H, W, C) or torch (N, C, H, W) float32 in [0, 1].

    With `vae`, x_0 holds latents. The conversion matches diffusers' DDPMPipeline and its numpy_to_pil.
    Raises NonFiniteError for NaN or infinity.
    """
    return begin_decode(x, output_type, vae)()


def begin_decode(x: Tensor, output_type: str, vae: DecoderLike | None = None) -> Callable[[], Any]:
    """Start `decode` without waiting for the GPU. The returned function waits and finishes as `decode` does."""
    whose = "model" if vae is None else "VAE"
    x = x if vae is None else decode_latents(vae, x)
    finite = fetch(x.isfinite().all())
    x = (x / 2 + 0.5).clamp(0, 1)
    if output_type == "pil":
        x = (x * 255).round().to(torch.uint8)
    pictures = fetch(x) if output_type != "pt" else lambda: x.permute(0, 3, 1, 2)

    def end() -> Any:
        _refuse_unless(bool(finite()), whose)
        if output_type == "pt":
            return pictures()
        array = pictures().numpy()
        return array if output_type == "np" else [_to_image(levels) for levels in array]

    return end


def begin_latents(x: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns latents x (N, h, w, C) as (N, C, h, w). It raises as `decode`."""

    def end() -> Tensor:
        check_finite(x)
        return x.permute(0, 3, 1, 2)

    return end


def decode_latents(vae: DecoderLike, latents: Tensor) -> Tensor:
    """Decode latents (N, h, w, C) float32 to pictures (N, H, W, 3) float32, about in [-1, 1], as DiTPipeline does.

    Runs that share work decode together.
    """
    decoded: Tensor = done(AskedDecode(vae, partial(_decoded, vae), latents))
    return decoded


def _decoded(vae: DecoderLike, latents: Tensor) -> Tensor:
    (sample,) = vae.decode((latents / vae.config.scaling_factor).permute(0, 3, 1, 2))
    return sample.permute(0, 2, 3, 1)


def with_mean_and_std(vae: DecoderLike, latents: Tensor) -> Tensor:
    """Rescale latents (N, h, w, C) from mean 0 and deviation 1 to the mean and deviation in the VAE's config.

    StableDiffusionXLPipeline does so before decoding; diffusers' other pipelines do not. Return the latents unchanged
    unless the config has both `latents_mean` and `latents_std`.
    """
    mean, std = vae.config.latents_mean, vae.config.latents_std
    if mean is None or std is None:
        return latents
    return latents * latents.new_tensor(std) + vae.config.scaling_factor * latents.new_tensor(mean)


def check_channels(channels: int, output_type: str) -> None:
    """Raise InputError if the output type does not support this number of channels."""
    if output_type == "pil" and channels > MOST_CHANNELS:
        raise InputError(
            f"output_type: this model's pictures have {channels} channels, but PIL and PNG allow at most "
            f"{MOST_CHANNELS}; use output_type np or pt from Python"
        )


def join(parts: list[Any], output_type: str) -> Any:
    """Join pictures that were decoded in parts. The result equals `decode` of the whole batch."""
    if len(parts) == 1:
        return parts[0]
    if output_type == "pil":
        return list(chain(*parts))
    return np.concatenate(parts) if output_type == "np" else torch.cat(parts)


def check_finite(x: Tensor, whose: str = "model") -> None:
    """Raise NonFiniteError for NaN or infinity in a model's final output. The message names `whose` output it is."""
    _refuse_unless(bool(x.isfinite().all()), whose)


def _refuse_unless(finite: bool, whose: str) -> None:
    if not finite:
        raise NonFiniteError(
            f"the {whose}'s output is NaN or infinite; try --dtype float32, or check the {whose}'s weights"
        )


def _to_image(levels: np.ndarray) -> Image.Image:
    """Return an image of levels (H, W, C) uint8, with its own memory."""
    return Image.fromarray((levels[..., 0] if levels.shape[-1] == 1 else levels).copy())
