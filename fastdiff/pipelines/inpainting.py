"""Inpainting: a run that paints anew where a mask is white, as diffusers' Inpaint pipelines.

A U-Net of x_t alone paints everything; after each step the latents outside the mask are set to the picture's. An
inpainting U-Net also reads the mask and the latents of the picture without its masked part.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.diffusion.known_pixels import KnownPixels
from fastdiff.diffusion.pictures import checked_side, completed_size
from fastdiff.diffusion.results import Step
from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, tensor
from fastdiff.kinds import Margin, Radius
from fastdiff.models.coding import Autoencoder
from fastdiff.pipelines.drawing import DrawingOptions, Started
from fastdiff.pipelines.image_processor import ImageProcessor
from fastdiff.pipelines.image_to_image import Encoding, ImageOptions, ImageStart, mixed, read_images, repeated
from fastdiff.pipelines.masks import Box, binary, crop_region, filled, overlaid, read_masks
from fastdiff.pipelines.pil_images import as_rgb
from fastdiff.pipelines.refining import DenoisingStart
from fastdiff.pipelines.strength import Strength
from fastdiff.requests.defaults import strength_of
from fastdiff.samplers.shared.noise import Noise
from fastdiff.samplers.shared.schedule import Schedule
from fastdiff.schema import checked


@dataclass(frozen=True)
class MaskOptions:
    """The arguments of inpainting beside `image` and `strength`, as in diffusers' StableDiffusionInpaintPipeline."""

    mask_image: Any = None
    masked_image_latents: Tensor | None = None
    padding_mask_crop: int | None = None
    mask_blur: float = 0.0  # pixels

    def __post_init__(self) -> None:
        checked("padding_mask_crop", self.padding_mask_crop, Margin | None)
        checked("mask_blur", self.mask_blur, Radius)
        if self.mask_image is None:
            for name in ("masked_image_latents", "padding_mask_crop", "mask_blur"):
                value = getattr(self, name)
                if value is not None and (name != "mask_blur" or value):
                    raise InputError(f"{name}: only a call with mask_image takes it; give a mask, or leave it out")


class Crop(NamedTuple):
    """The part of a picture that is drawn, and what it is put back into."""

    box: Box
    mask: Image.Image
    image: Image.Image

    def put_back(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield the steps. The pictures of the last one are whole again."""
        for step in steps:
            yield step if step.finish is None else replace(step, finish=partial(self._whole, step))

    def _whole(self, step: Step) -> list[Image.Image]:
        return [overlaid(self.mask, self.image, drawn, self.box) for drawn in step.images]


@dataclass(frozen=True)
class InpaintStart(ImageStart):
    """Starts a run that paints anew where masks are white. It is a `drawing.Start`."""

    masked: ClassVar[bool] = True
    masks: Tensor  # (K, 1, H, W) float32 of 0 and 1, as large as the pictures
    masked_latents: Tensor | None  # (L, C, h, w), if the caller gave them
    reads_mask: bool  # whether the U-Net has channels for the mask and the masked picture
    dtype: torch.dtype  # of the U-Net
    crop: Crop | None

    @property
    def given(self) -> dict[str, int]:
        """The number of pictures, masks and masked latents by argument."""
        latents = {} if self.masked_latents is None else {"masked_image_latents": len(self.masked_latents)}
        return super().given | {"mask_image": len(self.masks)} | latents

    def prepare(self, noise: Noise, schedule: Schedule, latents: Tensor | None) -> Started:
        """Draw in diffusers' order: the picture's posterior, the noise, and the masked picture's posterior.

        At full strength the run starts from noise alone, and so it does from `latents`. With Z-Image, `latents` are not
        the noise of the known pixels, which is drawn first.
        """
        drawn, count = noise.in_turn(), len(noise.seeds)
        from_noise = self.begins == Strength(1.0) or latents is not None
        of_known = drawn.start() if self.encoding.of_captions and latents is not None else None
        known = None if from_noise and self.reads_mask else self._latents(drawn, each=noise.generator is None)
        eps = drawn.start(latents)
        of_known = eps if of_known is None else of_known
        if from_noise or known is None:
            x_t = eps * schedule.init_noise_sigma
        else:  # what comes from the first part of a run has its noise already
            x_t = known if isinstance(self.begins, DenoisingStart) else mixed(known, eps, schedule)
        masks = F.interpolate(self.masks, size=tuple(x_t.shape[1:3])).to(noise.device)
        masks = repeated(masks, count).permute(0, 2, 3, 1).contiguous()
        if not self.reads_mask:
            assert known is not None
            self._skip_masked(noise)
            return Started(x_t, KnownPixels(masks > 0, known, of_known, schedule.shares))
        masked = self._masked(drawn, each=noise.generator is None)
        return Started(x_t, inputs=torch.cat([masks, masked], dim=-1).to(self.dtype))

    def _masked(self, noise: Noise, *, each: bool) -> Tensor:
        """Return the latents of the pictures without their masked part, (N, h, w, C) float32."""
        if self.masked_latents is not None:
            latents = repeated(self.masked_latents.to(noise.device, torch.float32), len(noise.seeds))
        else:
            latents = self.encoding.encode(self._masked_pictures(len(noise.seeds)), noise, each=each)
        return latents.permute(0, 2, 3, 1).contiguous()

    def _skip_masked(self, noise: Noise) -> None:
        """Draw what diffusers draws for the masked picture, which only a U-Net with channels for it reads."""
        if noise.generator is not None and self.masked_latents is None and not self.are_latents:
            self.encoding.skip(self._pairs(len(noise.seeds)), self.size, noise)

    def _masked_pictures(self, count: int) -> Tensor:
        pairs = self._pairs(count)
        return repeated(self.images, pairs) * (repeated(self.masks, pairs) < 0.5)

    def _pairs(self, count: int) -> int:
        """Return the number of different pictures with a mask. It is at most `count`."""
        several = {len(self.images), len(self.masks)} - {1}
        return several.pop() if len(several) == 1 else count if several else 1


def read_inpainting(
    options: ImageOptions,
    of_mask: MaskOptions,
    asked: DrawingOptions,
    vae: Autoencoder,
    encoding: Encoding,
    config: DenoiserConfig,
    dtype: torch.dtype,
    *,
    own_size: bool = False,
    factor: int = 1,
) -> InpaintStart:
    """Check the pictures and masks of a call. `config` and `dtype` are the U-Net's. Raises InputError.

    own_size: whether height and width default to the picture's own, as in diffusers' pipelines with a ControlNet.
    factor: divides the height and width of latents.
    """
    if options.image is None:
        raise InputError("mask_image: it says where to change image; give image too, or leave it out")
    masks, crop = read_masks(of_mask.mask_image, of_mask.mask_blur), None
    if of_mask.padding_mask_crop is None:
        sides = checked_side("height", asked.height), checked_side("width", asked.width)
        size_of = (lambda: sides) if own_size else partial(completed_size, config, *sides, vae.config.scale)
        images, are_latents = read_images(options.image, vae, size_of, factor)
    else:
        sides = _own_size(options.image, asked, vae, factor) if own_size else (asked.height, asked.width)
        height, width = completed_size(config, *sides, vae.config.scale)
        crop = _crop(options.image, masks, (height, width), of_mask.padding_mask_crop, asked.output_type)
        part = filled(crop.image.crop(crop.box), width, height)
        images, are_latents = read_images(part, vae, lambda: (height, width), factor)
    scale = vae.config.scale if are_latents else 1
    size = images.shape[2] * scale, images.shape[3] * scale
    given = of_mask.masked_image_latents
    latents = None if given is None else _masked_latents(given, vae, size)
    if are_latents and latents is None and config.inpaints:
        raise InputError("image: this model reads the masked picture; give a picture, or masked_image_latents too")
    of_captions = encoding.of_captions
    usual = strength_of(of_sdxl=encoding.of_sdxl, masked=True, of_captions=of_captions)
    begins = options.begins_at(usual, of_captions=of_captions)
    if isinstance(begins, DenoisingStart) and asked.latents is not None:
        raise InputError("latents: a run with denoising_start goes on from image; leave out one of the two")
    box = None if crop is None else crop.box
    found = binary(masks, size, box)
    return InpaintStart(
        images, are_latents, vae.config.scale, begins, encoding, found, latents, config.inpaints, dtype, crop
    )


def _own_size(image: Any, asked: DrawingOptions, vae: Autoencoder, factor: int) -> tuple[int, int]:
    """Return the height and width of a run. They default to the size of the PIL image."""
    pixels = ImageProcessor(factor * vae.config.scale).preprocess(image, asked.height, asked.width)
    return pixels.shape[2], pixels.shape[3]


def _crop(image: Any, masks: Any, size: tuple[int, int], pad: int, output_type: str | None) -> Crop:
    """Return the part of a picture to draw. Raises InputError unless there is one PIL image and one PIL mask."""
    one = image[0] if isinstance(image, list | tuple) and len(image) == 1 else image
    if not isinstance(one, Image.Image) or not isinstance(masks, list) or len(masks) != 1:
        raise InputError("padding_mask_crop: it crops one PIL image by one PIL mask; give image and mask_image as such")
    if output_type not in (None, "pil"):
        raise InputError(f"padding_mask_crop: it returns PIL images; give output_type pil instead of {output_type}")
    picture, (mask,) = as_rgb(one), masks
    if picture.size != mask.size:
        raise InputError(
            f"padding_mask_crop: image is {picture.height} x {picture.width} and mask_image {mask.height} x "
            f"{mask.width}; give both the same size"
        )
    height, width = size
    return Crop(crop_region(mask, width, height, pad), mask, picture)


def _masked_latents(given: Any, vae: Autoencoder, size: tuple[int, int]) -> Tensor:
    tensor("masked_image_latents", given, FLOATS)
    shape = (vae.config.latent_channels, *(side // vae.config.scale for side in size))
    if given.ndim != 4 or not len(given) or tuple(given.shape[1:]) != shape:
        raise InputError(f"masked_image_latents: expected (N, {', '.join(map(str, shape))}), got {tuple(given.shape)}")
    return given.detach()
