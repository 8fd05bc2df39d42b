"""Masks of inpainting: white is painted anew. They are blurred, cropped, resized and made black and white.

The functions match diffusers' VaeImageProcessor.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.pipelines.pil_images import upright

LANCZOS = Image.Resampling.LANCZOS
RESIZED = ("1", "L", "P", "LA", "RGB", "RGBA")  # modes that are resized before they become grey, as in diffusers
_WANTED = "give PIL images, arrays or tensors (H, W) or (N, H, W) in [0, 1], of one size"

Box = tuple[int, int, int, int]  # left, top, right and bottom


def read_masks(mask_image: Any, blur: float = 0.0) -> list[Image.Image] | Tensor:
    """Return the masks of a call, blurred: PIL images, upright as their EXIF says, or (K, 1, H, W) float32.

    Raises InputError for anything else, for no masks, and for NaN or infinity.
    """
    given = mask_image if isinstance(mask_image, list | tuple) else [mask_image]
    if given and all(isinstance(each, Image.Image) for each in given):
        masks = [_in_a_mode_to_resize(upright(each, "mask_image")) for each in given]
        return [blurred(each, blur) for each in masks] if blur else masks
    values = _stacked(given, mask_image)
    if not values.isfinite().all():
        raise InputError("mask_image: it has NaN or infinite values; give finite ones")
    if not blur:
        return values
    levels = (values[:, 0].clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    soft = [np.asarray(blurred(Image.fromarray(each), blur)) for each in levels]
    return torch.from_numpy(np.stack(soft)).float()[:, None] / 255


def binary(masks: Sequence[Image.Image] | Tensor, size: tuple[int, int], box: Box | None = None) -> Tensor:
    """Return masks of a size (height, width) as (K, 1, height, width) float32, 1 where they are white, else 0.

    PIL masks are resized with Lanczos filters, others with the nearest pixels. With `box`, PIL masks are cropped to it,
    and fill the size.
    """
    height, width = size
    if isinstance(masks, Tensor):
        values = masks if masks.shape[2:] == size else F.interpolate(masks, size=size)
    else:
        sized = [resized(each, width, height, box).convert("L") for each in masks]
        values = torch.from_numpy(np.stack([np.asarray(each) for each in sized])).float()[:, None] / 255
    return (values >= 0.5).float()


def resized(image: Image.Image, width: int, height: int, box: Box | None) -> Image.Image:
    """Return an image of a size, from its part in `box`, if one is given."""
    return image.resize((width, height), LANCZOS) if box is None else filled(image.crop(box), width, height)


def blurred(mask: Image.Image, radius: float) -> Image.Image:
    """Return a mask in shades of grey with a Gaussian blur of a radius in pixels, as diffusers' `blur`."""
    return mask.convert("L").filter(ImageFilter.GaussianBlur(radius))


def crop_region(mask: Image.Image, width: int, height: int, pad: int) -> Box:
    """Return the box of a mask's white parts with a margin of `pad` pixels, in the proportions of width and height.

    As diffusers' `get_crop_region`. Raises InputError for a black mask.
    """
    white = np.asarray(mask.convert("L")) > 0
    rows, columns = white.any(axis=1).nonzero()[0], white.any(axis=0).nonzero()[0]
    if not len(rows):
        raise InputError("mask_image: it is black, so there is nothing to crop to; paint white what shall change")
    left, right = max(columns[0] - pad, 0), min(columns[-1] + 1 + pad, mask.width)
    top, bottom = max(rows[0] - pad, 0), min(rows[-1] + 1 + pad, mask.height)
    if (right - left) / (bottom - top) > width / height:
        top, bottom = _widened(top, bottom, (right - left) / (width / height), mask.height)
    else:
        left, right = _widened(left, right, (bottom - top) * (width / height), mask.width)
    return int(left), int(top), int(right), int(bottom)


def filled(image: Image.Image, width: int, height: int) -> Image.Image:
    """Return an image that fits into width x height, and whose edges fill the rest. As diffusers' mode `fill`."""
    ratio, own = width / height, image.width / image.height
    fitting = (width if ratio < own else image.width * height // image.height,
               height if ratio >= own else image.height * width // image.width)  # fmt: skip
    fitted = image.resize(fitting, LANCZOS)
    result = Image.new("RGB", (width, height))
    left, top = width // 2 - fitted.width // 2, height // 2 - fitted.height // 2
    result.paste(fitted, box=(left, top))
    if ratio < own and top > 0:
        result.paste(fitted.resize((width, top), box=(0, 0, width, 0)), box=(0, 0))
        edge = (0, fitted.height, width, fitted.height)
        result.paste(fitted.resize((width, top), box=edge), box=(0, top + fitted.height))
    elif ratio > own and left > 0:
        result.paste(fitted.resize((left, height), box=(0, 0, 0, height)), box=(0, 0))
        edge = (fitted.width, 0, fitted.width, height)
        result.paste(fitted.resize((left, height), box=edge), box=(left + fitted.width, 0))
    return result


def overlaid(mask: Image.Image, image: Image.Image, drawn: Image.Image, box: Box) -> Image.Image:
    """Return `image` with `drawn` in a box, where the mask is white. As diffusers' `apply_overlay`."""
    kept = Image.new("RGBa", image.size)
    kept.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask.convert("L")))
    left, top, right, bottom = box
    base = Image.new("RGBA", image.size)
    base.paste(_covering(drawn, right - left, bottom - top), (left, top))
    result = base.convert("RGB").convert("RGBA")
    result.alpha_composite(kept.convert("RGBA"))
    return result.convert("RGB")


def _covering(image: Image.Image, width: int, height: int) -> Image.Image:
    """Return an image that is resized to cover width x height, and cut at its edges. As diffusers' mode `crop`."""
    ratio, own = width / height, image.width / image.height
    size = (width if ratio > own else image.width * height // image.height,
            height if ratio <= own else image.height * width // image.width)  # fmt: skip
    large = image.resize(size, LANCZOS)
    result = Image.new("RGB", (width, height))
    result.paste(large, box=(width // 2 - size[0] // 2, height // 2 - size[1] // 2))
    return result


def _widened(first: int, last: int, wanted: float, most: int) -> tuple[int, int]:
    """Return a range of the `wanted` length around another one, within 0 and `most`."""
    more = int(wanted - (last - first))
    first -= more // 2
    last += more - more // 2
    over = max(last - most, 0)
    first, last = first - over, last - over
    under = max(-first, 0)
    return first + under, min(last + under, most)


def _in_a_mode_to_resize(mask: Image.Image) -> Image.Image:
    if isinstance(mask.info.get("transparency"), bytes):
        mask = mask.copy()
        del mask.info["transparency"]  # else PIL warns that it drops the palette's alphas
    if mask.mode in RESIZED:
        return mask
    return (mask.convert("RGB") if mask.mode == "LAB" else mask).convert("L")  # PIL has no grey of LAB


def _stacked(masks: Sequence[Any], given: Any) -> Tensor:
    """Return arrays or tensors as (K, 1, H, W) float32 in [0, 1]; bytes are levels from 0 to 255."""
    found = [each for each in (_planes(mask) for mask in masks) if each is not None and each.numel()]
    if not found or len(found) < len(masks) or len({each.shape[1:] for each in found}) > 1:
        raise InputError(f"mask_image: {shown(given)} holds no masks; {_WANTED}")
    return torch.cat(found)[:, None]


def _planes(mask: Any) -> Tensor | None:
    """Return an array (H, W), (N, H, W) or (N, H, W, 1), or a tensor with its channel second, as (K, H, W)."""
    if isinstance(mask, np.ndarray) and mask.dtype.kind in "biuf":
        values, channel = torch.from_numpy(np.array(mask, np.float32, order="C")), -1
        is_bytes = mask.dtype == np.uint8
    elif isinstance(mask, Tensor) and not mask.is_complex():
        values, channel, is_bytes = mask.detach().float(), 1, mask.dtype == torch.uint8
    else:
        return None
    values = values / 255 if is_bytes else values
    if values.ndim == 4 and values.shape[channel] == 1:
        values = values.squeeze(channel)
    if values.ndim == 3 and channel == -1 and values.shape[-1] == 1 < values.shape[1]:
        values = values.squeeze(-1)[None]
    values = values[None] if values.ndim == 2 else values
    return values if values.ndim == 3 else None
