"""CLIPImageProcessor: prepares pictures for CLIP's image encoder, as transformers' class of this name does."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_PICTURES
from fastdiff.pipelines.pil_images import as_rgb

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)  # of CLIP's training data
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


class CLIPImageProcessor:
    """The `feature_extractor` of a pipeline with an IP-Adapter.

    The shorter side of a picture becomes `size` with bicubic filters, its centre is cut out, and its channels are
    normalised. The numbers are equal to transformers' CLIPImageProcessor with PIL.

    Attributes:
        size: of the square that the encoder reads, in pixels.
    """

    def __init__(self, size: int = 224):
        self.size = size

    def __call__(self, images: Any, name: str = "images") -> Tensor:
        """Return pictures as (N, 3, size, size) float32.

        Args:
            images: a PIL image of any mode, an array (H, W, 3) of bytes, or a list of them. Sizes may differ.
            name: of the argument in errors.

        Raises InputError for anything else, and for a picture that cannot be read.
        """
        given = images if isinstance(images, list | tuple) else [images]
        if not 0 < len(given) <= MAX_PICTURES:
            raise InputError(f"{name}: {len(given)} pictures given; give 1 to {MAX_PICTURES}")
        return torch.stack([self._normalised(as_rgb(_picture(each, name), name)) for each in given])

    def _normalised(self, image: Image.Image) -> Tensor:
        width, height = image.size
        short, long = min(width, height), max(width, height)
        longer = int(self.size * long / short)
        sides = (self.size, longer) if width <= height else (longer, self.size)
        image = image.resize(sides, Image.Resampling.BICUBIC)
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        image = image.crop((left, top, left + self.size, top + self.size))
        levels = (np.asarray(image).astype(np.float64) * (1 / 255)).astype(np.float32)
        return torch.from_numpy((levels - MEAN) / STD).permute(2, 0, 1)


def _picture(given: Any, name: str) -> Image.Image:
    if isinstance(given, Image.Image):
        return given
    is_bytes = isinstance(given, np.ndarray) and given.dtype == np.uint8 and given.size > 0
    if is_bytes and given.ndim == 3 and given.shape[2] == 3:
        return Image.fromarray(np.ascontiguousarray(given))
    raise InputError(f"{name}: {shown(given)} is no picture; give PIL images, or arrays (H, W, 3) of bytes")
