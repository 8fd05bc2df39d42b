"""Halve and double the resolution: with convolutions, or without weights (in plain channels-last torch)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.kernels.conv2d import Padding
from fastdiff.models.blocks.layers import Conv2d, Feature


class Downsample2D(nn.Module):
    """A 3x3 convolution of stride 2; diffusers' Downsample2D. Padding 0 pads right and bottom by 1, as in DDPM."""

    def __init__(self, channels: int, padding: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3)
        self.padding: Padding = padding or (0, 1, 0, 1)

    def forward(self, x: Feature) -> Feature:
        return self.conv(x, stride=2, padding=self.padding)


class Upsample2D(nn.Module):
    """Nearest upsampling by 2, or to a skip connection's size, then a 3x3 convolution; diffusers' Upsample2D."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3)

    def forward(self, x: Feature, size: tuple[int, int] | None = None) -> Feature:
        height, width = x.x.shape[1:3]
        if size is None or size == (2 * height, 2 * width):
            return self.conv(x, upsample=True)
        return self.conv(_channels_last(F.interpolate(_channels_first(x), size)))


def average_down(feature: Feature) -> Feature:
    """Average 2 x 2 pixels; diffusers' Downsample2D(use_conv=False)."""
    return _channels_last(F.avg_pool2d(_channels_first(feature), 2))


def nearest_up(feature: Feature) -> Feature:
    """Repeat each pixel 2 x 2 times; diffusers' Upsample2D(use_conv=False)."""
    return Feature(feature.x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2))


def fir_down(feature: Feature, pad: str = "constant") -> Feature:
    """Blur with (1, 3, 3, 1), keep every second pixel; diffusers' FirDownsample2D, or KDownsample2D with "reflect"."""
    x = F.pad(_channels_first(feature), (1, 1, 1, 1), pad)
    return _channels_last(F.conv2d(x, _fir_kernel(x), stride=2, groups=x.shape[1]))


def fir_up(feature: Feature, pad: str = "constant") -> Feature:
    """Transpose of `fir_down`, with gain 4; diffusers' FirUpsample2D, or KUpsample2D with "reflect"."""
    x = F.pad(_channels_first(feature), (1, 1, 1, 1), pad)
    return _channels_last(F.conv_transpose2d(x, 4 * _fir_kernel(x), stride=2, padding=3, groups=x.shape[1]))


def _channels_first(feature: Feature) -> Tensor:
    return feature.x.permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> Feature:
    return Feature(x.permute(0, 2, 3, 1).contiguous())


def _fir_kernel(x: Tensor) -> Tensor:
    # (1, 3, 3, 1) / 8, made on the device, because a CUDA graph cannot copy it there
    taps = (4 - 2 * (torch.arange(4, device=x.device) - 1.5).abs()) / 8
    return torch.outer(taps, taps).to(x.dtype).expand(x.shape[1], 1, 4, 4)
