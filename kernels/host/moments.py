"""Moments: mean and M2, which a convolution passes to the next GroupNorm so that it need not read the tensor for them.

The docstring of kernels/group_norm.py has a diagram.
"""

from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Mean and M2 of a tensor (N, H, W, C), per channel and per tile of pixels.

    Tiles partition a picture's pixels, `pixels` each; the last may be shorter. The convolution decides which pixels
    form a tile, in the same way for every batch.
    """

    mean: Tensor  # (N, tiles, C) float32
    m2: Tensor  # (N, tiles, C) float32, the sum of squared distances from that mean
    pixels: int  # per full tile; depends on the picture's shape alone, never on the batch
