"""Hires: draw a picture, enlarge it, and go on from there with image to image, as A1111's "Hires. fix" does.

A model draws best at the size it was trained with. Larger pictures repeat their subject; an enlarged one does not.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from PIL import Image

from fastdiff.diffusion.results import Step
from fastdiff.errors import InputError
from fastdiff.kinds import Fraction, Upscale, UpscaleMode
from fastdiff.pipelines.drawing import DrawingOptions, names_of
from fastdiff.pipelines.refining import PartOptions
from fastdiff.pipelines.strength import Strength
from fastdiff.requests.completion import enlarged
from fastdiff.requests.defaults import UPSCALE_STRENGTH, Sampling
from fastdiff.schema import checked

LARGEST_WHOLE = 1536  # pixels of a side; the VAE computes larger pictures in tiles

# Arguments of the first part alone: the second starts from its pictures
_OF_THE_FIRST = ("latents", "height", "width")


@dataclass(frozen=True)
class UpscaleOptions:
    """The arguments of an enlarged picture."""

    upscale: float | None = None
    upscale_strength: float | None = None
    upscale_mode: str | None = None

    def __post_init__(self) -> None:
        checked("upscale", self.upscale, Upscale | None)
        checked("upscale_strength", self.upscale_strength, Fraction | None)
        checked("upscale_mode", self.upscale_mode, UpscaleMode | None)
        for name in ("upscale_strength", "upscale_mode"):
            if self.upscale is None and getattr(self, name) is not None:
                raise InputError(f"{name}: it says how upscale enlarges; give upscale, or leave it out")

    def first_part(self, asked: DrawingOptions, part: PartOptions, mask: Any) -> DrawingOptions:
        """Return the arguments of the first part of a call. Raises InputError for what cannot be enlarged."""
        if self.upscale is None:
            return asked
        given = {"mask_image": mask, "denoising_start": part.denoising_start, "denoising_end": part.denoising_end}
        for name, value in given.items():
            if value is not None:
                raise InputError(f"upscale: it goes on from whole new pictures; leave out {name}")
        return replace(asked, output_type="latent" if self.of_latents else "pil")

    @property
    def of_latents(self) -> bool:
        return self.upscale_mode == "latent"

    @property
    def strength(self) -> Strength:
        return Strength(UPSCALE_STRENGTH if self.upscale_strength is None else float(self.upscale_strength))

    def size(self, height: int, width: int, multiple: int) -> tuple[int, int]:
        """Return the size of an enlarged picture, in multiples that the model can draw."""
        assert self.upscale is not None
        return enlarged((height, width), self.upscale, multiple)


def go_on_larger(
    pipe: Any, first: Iterator[Step], options: UpscaleOptions, sampling: Sampling, given: Mapping[str, Any]
) -> Iterator[Step]:
    """Return the steps of a run and of one that goes on from its pictures, enlarged. The last step has the pictures.

    Args:
        pipe: a TextToImagePipeline.
        first: the steps of the first part, with the output of `UpscaleOptions.first_part`.
        options: with `upscale`.
        sampling: of both parts.
        given: the arguments of `TextToImagePipeline.stream` without `image` and `strength`. Both parts have the same
            seeds or generator, prompts and number of steps.

    Raises InputError if the strength leaves no step.
    """
    custom = given.get("timesteps"), given.get("sigmas")
    second = len(pipe._schedule(sampling, *custom, options.strength.begin))
    return _steps(pipe, first, options, given, second)


def _steps(
    pipe: Any, first: Iterator[Step], options: UpscaleOptions, given: Mapping[str, Any], second: int
) -> Iterator[Step]:
    for step in first:
        total, drawn = step.num_steps + second, step.images
        height, width = (pipe.scale * side for side in step.x_t.shape[1:3])
        yield replace(step, num_steps=total, finish=None)
    height, width = options.size(height, width, pipe.scale * pipe.denoiser.config.size_factor)
    larger: Any = [image.resize((width, height), Image.Resampling.LANCZOS) for image in drawn if not options.of_latents]
    if options.of_latents:
        larger = F.interpolate(drawn, (height // pipe.scale, width // pipe.scale), mode="bilinear")
    rest = {name: value for name, value in given.items() if name not in {*_OF_THE_FIRST, *names_of(UpscaleOptions)}}
    with _tiles(pipe.vae, max(height, width)):
        for step in pipe.stream(**rest, image=larger, strength=options.strength.value):
            yield replace(step, index=step.index + total - second, num_steps=total)


@contextmanager
def _tiles(vae: Any, side: int) -> Iterator[None]:
    """Let a VAE work in tiles during the block, if pictures of this side are too large for it as a whole."""
    before = getattr(vae, "use_tiling", None)
    if before is not None and side > LARGEST_WHOLE:
        vae.use_tiling = True
    try:
        yield
    finally:
        if before is not None:
            vae.use_tiling = before
