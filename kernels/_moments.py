"""Moments: what a convolution tells the GroupNorm that follows, so that nobody reads the tensor for its statistics."""

from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Statistics of a tensor (N, H, W, C), per channel and per tile of pixels.

    Tile t covers the pixels from t * pixels to (t + 1) * pixels of a picture flattened to H * W; the last may be short.
    """

    mean: Tensor  # (N, tiles, C) float32
    m2: Tensor  # (N, tiles, C) float32, the sum of squared distances from that mean
    pixels: int  # of a whole tile; depends on the picture's shape alone, never on the batch
