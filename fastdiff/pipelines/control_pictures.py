"""The control pictures of a call, as diffusers' `control_image_processor` reads them: for each ControlNet a tensor."""

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from fastdiff.diffusion.pictures import checked_side
from fastdiff.errors import InputError
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.pipelines.image_processor import ImageProcessor
from fastdiff.pipelines.inpainting import Crop
from fastdiff.pipelines.masks import filled
from fastdiff.pipelines.pil_images import as_rgb

NAME = "control_image"


def of_each_net(given: Any, count: int) -> list[Any]:
    """Return the control pictures of each of `count` ControlNets, not read yet.

    Several ControlNets take a list of pictures, one for each ControlNet. With several prompts, each prompt may have its
    own list. Raises InputError for anything else.
    """
    if count == 1:
        if isinstance(given, list | tuple) and any(isinstance(each, list | tuple) for each in given):
            raise InputError(f"{NAME}: a list of lists is for several ControlNets; give a list of pictures")
        return [given]
    if not isinstance(given, list | tuple):
        raise InputError(f"{NAME}: this pipeline has {count} ControlNets; give a list with a picture for each")
    nested = [isinstance(each, list | tuple) for each in given]
    rows = list(given) if all(nested) else [given]
    wrong = {len(row) for row in rows} - {count}
    if wrong or not rows:
        found = min(wrong, default=0)
        raise InputError(f"{NAME}: {found} given for {count} ControlNets; give a list with a picture for each")
    if not all(nested):
        return list(given)
    return [list(each) for each in zip(*rows, strict=True)]


def read_pictures(
    given: Sequence[Any],
    nets: Sequence[ControlNetModel],
    scale: int,
    size: tuple[Any, Any],
    crop: Crop | None = None,
) -> tuple[Tensor, ...]:
    """Return the pictures (K, C, H, W) float32 of each ControlNet, all of one size.

    Args:
        given: for each ControlNet: a PIL image, an array (H, W, C), a tensor (C, H, W) or a list or batch of one kind.
        nets: the ControlNets.
        scale: pixels for each latent; the size is a multiple of it.
        size: height and width; None for the first picture's own.
        crop: the part of the pictures to read, for inpainting with padding_mask_crop.

    Raises InputError for anything else, other channels, and NaN or infinity.
    """
    processor, found = ImageProcessor(scale, do_normalize=False, name=NAME), list[Tensor]()
    height, width = checked_side("height", size[0]), checked_side("width", size[1])
    for each, net in zip(given, nets, strict=True):
        each = each if crop is None else _cropped(each, crop, (height, width))
        pixels = processor.preprocess(each, height, width)
        channels = net.config.conditioning_channels
        if pixels.shape[1] == 1 and channels > 1:
            pixels = pixels.expand(-1, channels, -1, -1)
        if pixels.shape[1] != channels:
            raise InputError(
                f"{NAME}: it has {pixels.shape[1]} channels, and the ControlNet reads {channels}; give a PIL image, an "
                f"array (N, H, W, {channels}) or a tensor (N, {channels}, H, W)"
            )
        if not pixels.isfinite().all():
            raise InputError(f"{NAME}: it has NaN or infinite values; give finite ones")
        height, width = pixels.shape[2:]
        found.append(pixels)
    return tuple(found)


def _cropped(given: Any, crop: Crop, size: tuple[int | None, int | None]) -> list[Image.Image]:
    """Return the part of control pictures around the mask, as large as the run draws it."""
    images = given if isinstance(given, list | tuple) else [given]
    height, width = size
    assert height is not None and width is not None  # a run with a crop has a size
    if not all(isinstance(each, Image.Image) and each.size == crop.image.size for each in images):
        raise InputError(f"{NAME}: padding_mask_crop crops it as image; give PIL images of the same size")
    return [filled(as_rgb(each).crop(crop.box), width, height) for each in images]
