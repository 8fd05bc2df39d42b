"""ImageProcessor: converts pictures to tensors for a VAE, and its output to pictures."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.diffusion.decoding import OutputType, check_finite
from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, tensor
from fastdiff.kinds import Pixels
from fastdiff.pipelines.pil_images import as_rgb
from fastdiff.pipelines.surface import Surface
from fastdiff.schema import checked

_WANTED = "give PIL images, arrays (N, H, W, C) in [0, 1] or tensors (N, C, H, W) in [0, 1] or [-1, 1], of one size"


class ImageProcessor:
    """The `image_processor` of a text-to-image pipeline, as diffusers' VaeImageProcessor.

    Attributes:
        vae_scale_factor: the sides of preprocessed pictures are multiples of it.
        do_normalize: whether preprocessed pictures are in [-1, 1]. Otherwise, PIL images are in [0, 1], and the values
            of arrays and tensors stay as they are.
    """

    def __init__(self, vae_scale_factor: int, *, do_normalize: bool = True, name: str = "image"):
        """name: of the pictures in errors of `preprocess`."""
        self.vae_scale_factor, self.do_normalize, self._name = vae_scale_factor, do_normalize, name

    def postprocess(
        self, image: Tensor, output_type: str | None = "pil", do_denormalize: Sequence[bool] | None = None
    ) -> Any:
        """Return the output of a VAE as pictures.

        Args:
            image: (N, C, H, W), roughly in [-1, 1].
            output_type: `"pil"`, `"np"` (N, H, W, C), `"pt"` (N, C, H, W), or `"latent"`, which returns `image`.
            do_denormalize: for each picture, whether it is in [-1, 1]; others are in [0, 1]. Default: all are.

        Raises InputError for other arguments, and NonFiniteError for NaN or infinity.
        """
        kind = checked("output_type", output_type or "pil", Literal[OutputType, "latent"])
        tensor("image", image, FLOATS)
        if image.ndim != 4 or (kind == "pil" and image.shape[1] not in (1, 3, 4)):
            raise InputError(f"image: its shape is {tuple(image.shape)}; give (N, C, H, W) with 1, 3 or 4 channels")
        if kind == "latent":
            return image
        flags = [True] * len(image) if do_denormalize is None else do_denormalize
        flags = checked("do_denormalize", flags, tuple[bool, ...])
        if len(flags) != len(image):
            raise InputError(f"do_denormalize: {len(flags)} given for {len(image)} pictures; give one for each")
        pictures = zip(image.detach(), flags, strict=True)
        x = torch.stack([(each / 2 + 0.5).clamp(0, 1) if flag else each for each, flag in pictures])
        if kind == "pt":
            return x
        check_finite(x, "VAE")
        array = x.permute(0, 2, 3, 1).cpu().float().numpy()
        return array if kind == "np" else Surface.numpy_to_pil(array)

    def preprocess(self, image: Any, height: int | None = None, width: int | None = None) -> Tensor:
        """Return pictures as (N, C, H, W) float32 in [-1, 1], for a VAE's `encode`; see `do_normalize`.

        Args:
            image: a PIL image, an array (H, W, C) or (N, H, W, C) in [0, 1], a tensor (C, H, W) or (N, C, H, W) in
                [0, 1] or [-1, 1], or a list of one kind.
            height: in pixels. Default: the picture's own. It is rounded down to a multiple of `vae_scale_factor`.
            width: as `height`.

        PIL images of another size are resized with Lanczos filters, the others with the nearest pixels, as in
        diffusers. PIL images of any mode become RGB, and upright as their EXIF says. Raises InputError for anything
        else.
        """
        asked = checked("height", height, Pixels | None), checked("width", width, Pixels | None)
        images = image if isinstance(image, list | tuple) else [image]
        if images and all(isinstance(each, Image.Image) for each in images):
            pictures = [as_rgb(each) for each in images]
            height, width = self._size(asked, (pictures[0].height, pictures[0].width))
            pixels = [np.asarray(each.resize((width, height), Image.Resampling.LANCZOS)) for each in pictures]
            x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
            return 2 * x - 1 if self.do_normalize else x
        x = stacked(images, image, self._name)
        size = self._size(asked, (x.shape[2], x.shape[3]))
        x = x if size == tuple(x.shape[2:]) else F.interpolate(x, size=size)
        return x if x.min() < 0 or not self.do_normalize else 2 * x - 1

    def _size(self, asked: tuple[int | None, int | None], own: tuple[int, int]) -> tuple[int, int]:
        """Return the height and the width of preprocessed pictures."""
        height, width = (given or side for given, side in zip(asked, own, strict=True))
        factor = self.vae_scale_factor
        if min(height, width) < factor:
            raise InputError(f"{self._name}: {height} x {width} is too small; each side must be at least {factor}")
        return height - height % factor, width - width % factor


def stacked(images: Sequence[Any], given: Any, name: str = "image") -> Tensor:
    """Return arrays or tensors as one float32 tensor (N, C, H, W). `given` and `name` are for errors.

    Raises InputError for anything else, and for several sizes.
    """
    kinds: dict[Any, tuple[int, ...]] = {np.ndarray: (0, 3, 1, 2), Tensor: (0, 1, 2, 3)}
    for kind, order in kinds.items():
        if images and all(isinstance(each, kind) and each.ndim in (3, 4) and _is_real(each) for each in images):
            parts = [_as_float(each) for each in images]
            parts = [part if part.ndim == 4 else part[None] for part in parts]
            if len({part.shape[1:] for part in parts}) == 1 and all(part.numel() for part in parts):
                return torch.cat(parts).permute(order)
    raise InputError(f"{name}: {shown(given)} holds no pictures; {_WANTED}")


def _is_real(values: Any) -> bool:
    return values.dtype.kind in "biuf" if isinstance(values, np.ndarray) else not values.is_complex()


def _as_float(values: Any) -> Tensor:
    """Return an array or tensor as float32. Bytes are levels from 0 to 255, and become values in [0, 1]."""
    if isinstance(values, np.ndarray):
        numbers = torch.from_numpy(np.array(values, np.float32, order="C"))  # a copy, as it may not be writable
    else:
        numbers = values.detach().float()
    return numbers / 255 if values.dtype in (np.uint8, torch.uint8) else numbers
