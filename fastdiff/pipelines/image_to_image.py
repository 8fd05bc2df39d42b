"""Image to image: a run that starts from pictures with noise, as diffusers' Img2Img pipelines.

Pictures -> VAE -> latents, mixed with the noise of the first step; then the denoising loop.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastdiff.arguments import as_int
from fastdiff.diffusion.pictures import Subjects
from fastdiff.errors import InputError
from fastdiff.kinds import Fraction
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.coding import Autoencoder
from fastdiff.models.distribution import DiagonalGaussianDistribution
from fastdiff.pipelines.drawing import DrawingOptions, Started
from fastdiff.pipelines.image_processor import ImageProcessor, stacked
from fastdiff.pipelines.refining import DenoisingStart
from fastdiff.pipelines.strength import Strength
from fastdiff.requests.defaults import strength_of
from fastdiff.samplers.shared.noise import Generators, Noise, randn_tensor
from fastdiff.samplers.shared.schedule import Schedule
from fastdiff.schema import checked


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

    def begins_at(self, default: float, *, of_captions: bool = False) -> Strength | DenoisingStart:
        """Return where the run begins. `default` is the strength if none is given. of_captions: with Z-Image."""
        return self.begins or Strength(default if self.strength is None else float(self.strength), of_captions)


@dataclass(frozen=True)
class Encoding:
    """Encodes pictures with a pipeline's VAE, in the order of diffusers' draws."""

    vae: Autoencoder
    of_sdxl: bool
    working: Callable[[Autoencoder], AbstractContextManager[None]]  # keeps the VAE on the GPU during a block
    of_captions: bool = False  # whether it is Z-Image, whose latents are shifted as the VAE's config says

    @property
    def _upcasts(self) -> bool:
        """Whether the VAE reads and draws in float32, as in diffusers' SDXL pipelines."""
        return self.of_sdxl and getattr(self.vae.config, "force_upcast", False)

    def encode(self, pictures: Tensor, noise: Noise, *, each: bool) -> Tensor:
        """Return the latents (N, C, h, w) float32 of pictures (M, C, H, W) in [-1, 1], in turn.

        `noise` draws in turn. With `each`, every one of the N latents has its own draw; else the M pictures have one
        each, and their latents repeat.
        """
        count = len(noise.seeds)
        with self.working(self.vae):
            dtype = torch.float32 if self._upcasts else self.vae.dtype
            encoded, *_ = self.vae.encode(pictures.to(noise.device, dtype))
            if isinstance(encoded, DiagonalGaussianDistribution):
                parameters = repeated(encoded.parameters, count) if each else encoded.parameters
                if noise.dtype == torch.float32:
                    parameters = parameters.float()
                encoded = DiagonalGaussianDistribution(parameters).sample(_first(noise.generator, len(parameters)))
            return repeated(self._scaled(encoded.float()), count)

    def skip(self, pictures: int, size: tuple[int, int], noise: Noise) -> None:
        """Draw what `encode` draws for pictures of a size in pixels, without each."""
        if isinstance(self.vae, AutoencoderKL):
            config, (height, width) = self.vae.config, size
            shape = pictures, config.latent_channels, height // config.scale, width // config.scale
            dtype = torch.float32 if self._upcasts or noise.dtype == torch.float32 else self.vae.dtype
            randn_tensor(shape, _first(noise.generator, pictures), noise.device, dtype)

    def _scaled(self, latents: Tensor) -> Tensor:
        """Return a VAE's latents (N, C, h, w) as the U-Net knows them: of deviation 1, for SDXL also of mean 0."""
        config = self.vae.config
        if self.of_captions and config.shift_factor is not None:
            latents = latents - config.shift_factor
        mean, std = config.latents_mean, config.latents_std
        if not self.of_sdxl or mean is None or std is None:
            return config.scaling_factor * latents
        means, deviations = (latents.new_tensor(each)[:, None, None] for each in (mean, std))
        return (latents - means) * config.scaling_factor / deviations


@dataclass(frozen=True)
class ImageStart:
    """Starts a run from pictures or from their latents. It is a `drawing.Start`."""

    masked: ClassVar[bool] = False
    images: Tensor  # (M, C, H, W) in [-1, 1], or latents (M, C, h, w)
    are_latents: bool
    scale: int  # pixels for each latent
    begins: Strength | DenoisingStart
    encoding: Encoding

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the pictures in pixels."""
        height, width = self.images.shape[2:]
        scale = self.scale if self.are_latents else 1
        return height * scale, width * scale

    @property
    def given(self) -> dict[str, int]:
        """The number of pictures by argument."""
        return {"image": len(self.images)}

    def count(self, asked: DrawingOptions, subjects: Subjects) -> int | None:
        """Return the number of pictures that they ask for: if nothing else does, one for each of theirs, at least."""
        if any(count is not None for count in asked.counts.values()):
            return None
        per_subject = asked.seed if isinstance(asked.seed, list | tuple) else range(as_int(subjects.count) or 0)
        most = max(self.given.values())
        return most if most > len(subjects.each) * len(per_subject) else None

    def begin(self, timesteps: Tensor, steps: int, order: int) -> int:
        """As `Strength.begin`."""
        return self.begins.begin(timesteps, steps, order)

    def check_count(self, pictures: int) -> None:
        """Raise InputError unless there is one for each picture, or one for several."""
        for name, count in self.given.items():
            if pictures % count:
                raise InputError(f"{name}: {count} given for {pictures} pictures; give one, or one for each picture")

    def prepare(self, noise: Noise, schedule: Schedule, latents: Tensor | None) -> Started:
        """Draw the pictures' posterior and then the noise, and mix them as the first step has them."""
        drawn = noise.in_turn()
        each = isinstance(drawn.generator, list)  # as in diffusers, a generator draws once for each picture
        found = self._latents(drawn, each=each)
        if isinstance(self.begins, DenoisingStart):  # they have that noise already
            return Started(found)
        return Started(mixed(found, drawn.start(), schedule))

    def _latents(self, noise: Noise, *, each: bool) -> Tensor:
        """Return the latents of the pictures, (N, h, w, C) float32. Picture i is of image i modulo their number."""
        if self.are_latents:
            latents = repeated(self.images.to(noise.device, torch.float32), len(noise.seeds))
        else:
            latents = self.encoding.encode(self.images, noise, each=each)
        return latents.permute(0, 2, 3, 1).contiguous()


def read_image_to_image(
    options: ImageOptions, asked: DrawingOptions, vae: Autoencoder, encoding: Encoding, factor: int = 1
) -> ImageStart:
    """Check the pictures of a call. Raises InputError for anything but pictures or latents of one size.

    factor: divides the height and width of latents.
    """
    if asked.latents is not None:
        raise InputError("latents: a run with image starts from it; leave out one of the two")
    images, are_latents = read_images(options.image, vae, lambda: (asked.height, asked.width), factor)
    of_captions = encoding.of_captions
    usual = strength_of(of_sdxl=encoding.of_sdxl, masked=False, of_captions=of_captions)
    begins = options.begins_at(usual, of_captions=of_captions)
    return ImageStart(images, are_latents, vae.config.scale, begins, encoding)


def read_images(
    image: Any, vae: Autoencoder, size: Callable[[], tuple[int | None, int | None]], factor: int = 1
) -> tuple[Tensor, bool]:
    """Return pictures (M, C, H, W) float32 in [-1, 1], or latents (M, C, h, w), and whether they are latents.

    `size` returns the height and width of the pictures, None for their own. `factor` divides the height and width of
    latents. Raises InputError for anything else.
    """
    images = image if isinstance(image, list | tuple) else [image]
    are_latents = all(isinstance(each, Tensor) for each in images) and _channels(images) == {vae.config.latent_channels}
    if are_latents:
        found = stacked(images, image)
    else:
        found = _pictures(ImageProcessor(factor * vae.config.scale), image, size(), vae.config.in_channels)
    if not found.isfinite().all():
        raise InputError("image: it has NaN or infinite values; give finite ones")
    return found, are_latents


def mixed(latents: Tensor, noise: Tensor, schedule: Schedule) -> Tensor:
    """Return the x_t of a schedule's first step from latents and noise, (N, H, W, C) float32 each."""
    signal, sigma = schedule.shares[0]
    return signal * latents + sigma * noise


def repeated(tensor: Tensor, count: int) -> Tensor:
    """Return the entries of a tensor (M, ...) in turn, until there are `count`."""
    if len(tensor) == count:
        return tensor
    return tensor[torch.arange(count, device=tensor.device) % len(tensor)]


def _first(generator: Generators | None, count: int) -> Generators | None:
    """Return the generators of the first pictures, if each has its own."""
    return generator[:count] if isinstance(generator, list) else generator


def _pictures(processor: ImageProcessor, image: Any, size: tuple[int | None, int | None], channels: int) -> Tensor:
    """Return pictures as (M, channels, H, W) float32 in [-1, 1]. Shades of grey are repeated."""
    pixels = processor.preprocess(image, *size)
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
