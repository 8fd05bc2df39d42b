"""Reads PIL images that come from users: of any mode, rotated by EXIF, too large, or broken."""

import numpy as np
from PIL import Image, ImageOps

from fastdiff.errors import InputError
from fastdiff.kinds import MAX_SIDE

_LEVELS_OF_16_BITS = 257  # for each of 8 bits


def as_rgb(image: Image.Image, name: str = "image") -> Image.Image:
    """Return an image as RGB, upright as its EXIF says. Transparency is dropped, and 16 bits become 8.

    Of an animation it is the current picture. Raises InputError, which calls the image `name`, if its sides are larger
    than MAX_SIDE, or if its data cannot be read.
    """
    image = upright(image, name)
    if isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # else PIL warns that it drops the palette's alphas
    return image.convert("RGB")


def upright(image: Image.Image, name: str) -> Image.Image:
    """Return an image as its EXIF turns it, with 8 bits. Raises as `as_rgb`."""
    width, height = image.size
    if max(width, height) > MAX_SIDE:
        raise InputError(f"{name}: it is {height} x {width}, and each side must be at most {MAX_SIDE}; make it smaller")
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        assert turned is not None  # it is only with in_place
        return _with_8_bits(turned)
    except Exception as error:  # PIL's decoders raise anything on broken data
        told = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name}: its data cannot be read ({told}); save it again") from None


def _with_8_bits(image: Image.Image) -> Image.Image:
    if not image.mode.startswith("I"):
        return image
    levels = np.asarray(image).astype(np.float64) / _LEVELS_OF_16_BITS  # PNGs of 16 bits have mode I or I;16
    return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
