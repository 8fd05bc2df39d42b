"""Image to image: a run that starts from pictures with noise, as diffusers' Img2Img pipelines.

Pictures -> VAE -> latents, mixed with the noise of the first step; then the denoising loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.arguments import as_int
from fastdiff.diffusion.pictures import Subjects
from fastdiff.errors import InputError
from fastdiff.kinds import Fraction
from fastdiff.models.coding import Autoencoder
from fastdiff.models.distribution import DiagonalGaussianDistribution
from fastdiff.pipelines.drawing import DrawingOptions
from fastdiff.pipelines.image_processor import ImageProcessor, stacked
from fastdiff.pipelines.refining import DenoisingStart
from fastdiff.pipelines.strength import Strength
from fastdiff.samplers.shared.noise import Noise
from fastdiff.samplers.shared.schedule import Schedule
from fastdiff.schema import checked

STRENGTH, STRENGTH_OF_SDXL = 0.8, 0.3  # diffusers' defaults

# Encodes pictures (M, C, H, W) in [-1, 1] as latents (N, C, h, w) float32, with draws of the noise
Encode = Callable[[Tensor, Noise], Tensor]


@dataclass(frozen=True)
class ImageOptions:
    """The arguments of image to image, as in diffusers' StableDiffusionImg2ImgPipeline."""

    image: Any = None
    strength: float | None = None
    begins: DenoisingStart | None = None  # instead of `strength`

    def __post_init__(self) -> None:
        checked("strength", self.strength, Fraction | None)
        if self.image is None and self.strength is not None:
            raise InputError("strength: it says how much of image to change; give image, or leave it out")
        if self.image is None and self.begins is not None:
            raise InputError("denoising_start: the run goes on from image; give the latents of the first part as image")


@dataclass(frozen=True)
class ImageStart:
    """Starts a run from pictures or from their latents. It is a `drawing.Start`."""

    images: Tensor  # (M, C, H, W) in [-1, 1], or latents (M, C, h, w)
    are_latents: bool
    scale: int  # pixels for each latent
    begins: Strength | DenoisingStart
    encode: Encode

    @classmethod
    def read(
        cls, options: ImageOptions, asked: DrawingOptions, vae: Autoencoder, encode: Encode, *, of_sdxl: bool
    ) -> "ImageStart":
        """Check the pictures of a call. Raises InputError for anything but pictures or latents of one size."""
        if asked.latents is not None:
            raise InputError("latents: a run with image starts from it; leave out one of the two")
        images = options.image if isinstance(options.image, list | tuple) else [options.image]
        are_latents = all(isinstance(each, Tensor) for each in images) and _channels(images) == {
            vae.config.latent_channels
        }
        if are_latents:
            found = stacked(images, options.image)
        else:
            found = _pictures(ImageProcessor(vae.config.scale), options.image, asked, vae.config.in_channels)
        if not found.isfinite().all():
            raise InputError("image: it has NaN or infinite values; give finite ones")
        default = STRENGTH_OF_SDXL if of_sdxl else STRENGTH
        strength = Strength(default if options.strength is None else float(options.strength))
        return cls(found, are_latents, vae.config.scale, options.begins or strength, encode)

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the pictures in pixels."""
        height, width = self.images.shape[2:]
        scale = self.scale if self.are_latents else 1
        return height * scale, width * scale

    def count(self, asked: DrawingOptions, subjects: Subjects) -> int | None:
        """Return the number of pictures that they ask for: if nothing else does, one for each of theirs, at least."""
        if any(count is not None for count in asked.counts.values()):
            return None
        per_subject = asked.seed if isinstance(asked.seed, list | tuple) else range(as_int(subjects.count) or 0)
        return len(self.images) if len(self.images) > len(subjects.each) * len(per_subject) else None

    def begin(self, timesteps: Tensor, steps: int, order: int) -> int:
        """As `Strength.begin`."""
        return self.begins.begin(timesteps, steps, order)

    def check_count(self, pictures: int) -> None:
        """Raise InputError unless there is one for each picture, or one for several."""
        if pictures % len(self.images):
            raise InputError(
                f"image: {len(self.images)} given for {pictures} pictures; give one, or one for each picture"
            )

    def x_t(self, noise: Noise, schedule: Schedule) -> Tensor:
        """Return the pictures' latents with the noise of the first step, (N, h, w, C) float32.

        With a `DenoisingStart` the latents have that noise already.

        The pictures repeat, as in diffusers: picture i starts from image i modulo their number.
        """
        if self.are_latents:
            latents = repeated(self.images.to(noise.device, torch.float32), len(noise.seeds))
        else:
            latents = self.encode(self.images, noise)
        latents = latents.permute(0, 2, 3, 1).contiguous()
        if isinstance(self.begins, DenoisingStart):
            return latents
        signal, sigma = schedule.shares[0]
        return signal * latents + sigma * noise.start()


def encode_pictures(vae: Autoencoder, pictures: Tensor, noise: Noise, *, of_sdxl: bool) -> Tensor:
    """Return the latents (N, C, h, w) float32 of pictures (M, C, H, W) in [-1, 1], in the order of diffusers' draws.

    A generator draws for the M pictures, and their latents repeat for N; a list of generators draws for each of N. As
    in diffusers, an SDXL VAE with `force_upcast` reads and draws in float32.
    """
    upcasts = of_sdxl and getattr(vae.config, "force_upcast", False)
    encoded, *_ = vae.encode(pictures.to(noise.device, torch.float32 if upcasts else vae.dtype))
    if isinstance(encoded, DiagonalGaussianDistribution):
        parameters = encoded.parameters
        if isinstance(noise.generator, list):
            parameters = repeated(parameters, len(noise.seeds))
        exact = parameters.float() if noise.dtype == torch.float32 else parameters
        encoded = DiagonalGaussianDistribution(exact).sample(noise.generator)
    return repeated(_scaled(vae, encoded.float(), of_sdxl=of_sdxl), len(noise.seeds))


def repeated(tensor: Tensor, count: int) -> Tensor:
    """Return the entries of a tensor (M, ...) in turn, until there are `count`."""
    if len(tensor) == count:
        return tensor
    return tensor[torch.arange(count, device=tensor.device) % len(tensor)]


def _scaled(vae: Autoencoder, latents: Tensor, *, of_sdxl: bool) -> Tensor:
    """Return a VAE's latents (N, C, h, w) as the U-Net knows them: of deviation 1, for SDXL also of mean 0."""
    mean, std = vae.config.latents_mean, vae.config.latents_std
    if not of_sdxl or mean is None or std is None:
        return vae.config.scaling_factor * latents
    means, deviations = (latents.new_tensor(each)[:, None, None] for each in (mean, std))
    return (latents - means) * vae.config.scaling_factor / deviations


def _pictures(processor: ImageProcessor, image: Any, asked: DrawingOptions, channels: int) -> Tensor:
    """Return pictures as (M, channels, H, W) float32 in [-1, 1]. Shades of grey are repeated."""
    pixels = processor.preprocess(image, asked.height, asked.width)
    if pixels.shape[1] == 1:
        pixels = pixels.expand(-1, channels, -1, -1)
    if pixels.shape[1] != channels:
        raise InputError(
            f"image: it has {pixels.shape[1]} channels, and this model's VAE takes {channels}; give a PIL image, an "
            "array (N, H, W, 3) or a tensor (N, 3, H, W)"
        )
    return pixels


def _channels(images: Any) -> set[int]:
    return {each.shape[-3] if each.ndim in (3, 4) else 0 for each in images}
