"""Moments: mean and M2, which a convolution tells the GroupNorm that follows, so that nobody reads the tensor for them.

kernels/group_norm.py draws their way.
"""

from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Mean and M2 of a tensor (N, H, W, C), per channel and per tile of pixels.

    The tiles share out a picture's pixels, `pixels` each; the last may be short. Which pixels a tile has is for the
    convolution to say, and the same in any batch.
    """

    mean: Tensor  # (N, tiles, C) float32
    m2: Tensor  # (N, tiles, C) float32, the sum of squared distances from that mean
    pixels: int  # of a whole tile; depends on the picture's shape alone, never on the batch
