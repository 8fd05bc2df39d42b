"""Canny edges of pictures, which ControlNets read: the result of OpenCV's Canny, in numpy alone.

Source: Canny 1986, "A computational approach to edge detection". Like OpenCV's, this one does not blur the picture.
"""

from typing import TYPE_CHECKING

import numpy as np

from fastdiff.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

LOW, HIGH = 100, 200  # the thresholds of diffusers' examples
_SHIFT = 15  # bits behind the binary point
_TAN_22 = 13573  # the tangent of 22.5 degrees


def canny_picture(image: "Image", low: int = LOW, high: int = HIGH) -> "Image":
    """Return an RGB picture of the same size: the edges white, the rest black. Raises as `canny`."""
    from PIL import Image

    edges = canny(np.asarray(image.convert("RGB")), low, high)
    return Image.fromarray(np.repeat(edges[..., None], 3, axis=-1).astype(np.uint8) * 255)


def canny(pixels: np.ndarray, low: int = LOW, high: int = HIGH) -> np.ndarray:
    """Return where pictures have edges: (..., H, W, C) uint8 -> (..., H, W) bool.

    An edge is one pixel wide. It is a chain of pixels whose gradient is above `low`, at least one of them above `high`.
    The gradient of a pixel is |dx| + |dy| of Sobel's filters, at most 2040, in the channel where it is largest. Raises
    InputError if `low` is above `high`, or negative.
    """
    if not 0 <= low <= high:
        raise InputError(f"canny's thresholds are {low} and {high}; give 0 <= low <= high")
    dx, dy = _gradient(pixels)
    size = np.abs(dx) + np.abs(dy)
    thin = _ridges(dx, dy, size)
    return _connected(thin & (size > high), thin & (size > low))


def _gradient(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return dx and dy (..., H, W) int16, of each pixel's channel with the largest |dx| + |dy|."""
    margins = [(0, 0)] * (pixels.ndim - 3) + [(1, 1), (1, 1), (0, 0)]
    x = np.pad(pixels, margins, mode="edge").astype(np.int16)
    smooth = x[..., :-2, :, :] + 2 * x[..., 1:-1, :, :] + x[..., 2:, :, :]
    steps = x[..., 2:, :, :] - x[..., :-2, :, :]
    dx = smooth[..., 2:, :] - smooth[..., :-2, :]
    dy = steps[..., :-2, :] + 2 * steps[..., 1:-1, :] + steps[..., 2:, :]
    channel = (np.abs(dx) + np.abs(dy)).argmax(axis=-1)[..., None]
    return np.take_along_axis(dx, channel, -1)[..., 0], np.take_along_axis(dy, channel, -1)[..., 0]


def _ridges(dx: np.ndarray, dy: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return where the gradient is larger than before and behind it, in its direction rounded to 45 degrees."""
    height, width = size.shape[-2:]
    around = np.pad(size, [(0, 0)] * (size.ndim - 2) + [(1, 1), (1, 1)])

    def beside(rows: int, columns: int) -> np.ndarray:
        return around[..., 1 + rows : 1 + rows + height, 1 + columns : 1 + columns + width]

    across, down = np.abs(dx).astype(np.int32), np.abs(dy).astype(np.int32) << _SHIFT
    tan_22 = across * _TAN_22
    horizontal = (size > beside(0, -1)) & (size >= beside(0, 1))
    vertical = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    slanted = np.where((dx < 0) == (dy < 0), falling, rising)
    steep = down > tan_22 + (across << (_SHIFT + 1))  # tan 67.5 = tan 22.5 + 2
    return np.where(down < tan_22, horizontal, np.where(steep, vertical, slanted))


def _connected(strong: np.ndarray, weak: np.ndarray) -> np.ndarray:
    """Return the pixels of `weak` that a chain of its pixels, corners included, connects to one of `strong`."""
    margins = [(0, 0)] * (weak.ndim - 2) + [(1, 1), (1, 1)]
    left, found = np.pad(weak & ~strong, margins), np.pad(strong, margins)
    row = left.shape[-1]
    around = np.array([-row - 1, -row, -row + 1, -1, 1, row - 1, row, row + 1])
    shape = found.shape
    left, found = left.ravel(), found.ravel()
    new = np.flatnonzero(found)
    while new.size:
        near = (new[:, None] + around).ravel()
        new = np.unique(near[left[near]])
        found[new], left[new] = True, False
    return found.reshape(shape)[..., 1:-1, 1:-1]
