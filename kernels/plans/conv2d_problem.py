"""The sizes of a convolution, which determine its tiles."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """The sizes of one call of `kernels.conv2d.conv2d`."""

    pictures: int
    height: int  # of the input
    width: int
    channels: tuple[int, ...]  # of each input tensor
    out_channels: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int, int, int]  # left, right, top, bottom
    upsample: bool
    itemsize: int  # of the output
    group: int = 0  # channels in a group of the norm that follows; 0 without a norm
    fp8: bool = False  # whether the operands are fp8

    @property
    def x_itemsize(self) -> int:
        return 1 if self.fp8 else self.itemsize

    @property
    def out_height(self) -> int:
        height = self.height << self.upsample
        return (height + self.padding[2] + self.padding[3] - self.kernel[0]) // self.stride + 1

    @property
    def out_width(self) -> int:
        width = self.width << self.upsample
        return (width + self.padding[0] + self.padding[1] - self.kernel[1]) // self.stride + 1

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.pictures, self.out_height, self.out_width, self.out_channels

    @property
    def pixels(self) -> int:
        return self.out_height * self.out_width

    @property
    def fits_int32(self) -> bool:
        """Whether there are pictures, and a picture's elements fit the 32-bit offsets of the kernels."""
        most = max(self.height * self.width * max(self.channels), self.pixels * self.out_channels)
        return self.pictures > 0 and most < 2**31

    @property
    def mode(self) -> str:
        return "up" if self.upsample else "down" if self.stride == 2 else "same"

    @property
    def row(self) -> bool:
        """Whether pictures are one row of pixels: a one-dimensional convolution."""
        return self.height == self.kernel[0] == 1 and self.padding[2:] == (0, 0) and not self.upsample

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)
