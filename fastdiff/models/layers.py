"""The leaves of the U-Net: convolution, norm, embeddings, resampling, attention. Pictures are (N, H, W, C) throughout.

Parameters are named as diffusers names them, except that an attention holds one fused projection `to_qkv`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import Padding, conv2d
from fastdiff.kernels.group_norm import group_norm

Picture = Tensor | tuple[Tensor, Tensor]  # (N, H, W, C); a pair is a skip connection that nobody concatenates

ACTIVATIONS = {"silu": F.silu, "mish": F.mish, "gelu": F.gelu, "relu": F.relu}


def join(x: Picture) -> Tensor:
    """One tensor, for the rare operations that cannot read a pair."""
    return torch.cat(x, dim=-1) if isinstance(x, tuple) else x


class Conv2d(nn.Conv2d):
    """torch's Conv2d over (N, H, W, C), with the epilogue of `kernels.conv2d`."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, bias: bool = True):
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=bias)

    def forward(self, x: Picture, *, stride: int = 1, padding: Padding | None = None, **epilogue) -> Tensor:
        padding = self.padding[0] if padding is None else padding
        return conv2d(x, self.weight, self.bias, stride=stride, padding=padding, **epilogue)


class GroupNorm(nn.GroupNorm):
    """torch's GroupNorm over (N, H, W, C), with the scale, shift and activation of `kernels.group_norm`."""

    def forward(self, x: Picture, **epilogue) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps, **epilogue)


class Timesteps(nn.Module):
    """Sinusoidal embedding of timesteps, DDPM (arXiv 2006.11239); diffusers' Timesteps."""

    def __init__(self, width: int, flip_sin_to_cos: bool, freq_shift: float):
        super().__init__()
        self.width, self.flip_sin_to_cos, self.freq_shift = width, flip_sin_to_cos, freq_shift

    def forward(self, timesteps: Tensor) -> Tensor:
        """(N,) -> (N, width) float32."""
        half = self.width // 2
        exponent = -math.log(10_000) * torch.arange(half, dtype=torch.float32, device=timesteps.device)
        angles = timesteps[:, None].float() * torch.exp(exponent / (half - self.freq_shift))
        waves = [angles.cos(), angles.sin()] if self.flip_sin_to_cos else [angles.sin(), angles.cos()]
        return F.pad(torch.cat(waves, dim=-1), (0, self.width % 2))


class GaussianFourierProjection(nn.Module):
    """Random Fourier features of log noise levels, score SDE (arXiv 2011.13456); diffusers' class of this name."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 16, requires_grad=False)

    def forward(self, timesteps: Tensor) -> Tensor:
        """(N,) -> (N, 2 * width)."""
        angles = torch.log(timesteps)[:, None] * self.weight * 2 * math.pi
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TimestepEmbedding(nn.Module):
    """Linear, SiLU, Linear; diffusers' TimestepEmbedding."""

    def __init__(self, in_channels: int, width: int):
        super().__init__()
        self.linear_1 = nn.Linear(in_channels, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class Attention(nn.Module):
    """Self-attention over the pixels with a residual; diffusers' Attention as UNet2DModel configures it."""

    def __init__(self, channels: int, head_dim: int, num_groups: int | None, eps: float, output_scale: float):
        super().__init__()
        self.heads = channels // head_dim
        self.output_scale = output_scale
        width = self.heads * head_dim
        self.group_norm = GroupNorm(num_groups, channels, eps=eps) if num_groups is not None else None
        self.to_qkv = nn.Linear(channels, 3 * width)
        self.to_out = nn.ModuleList([nn.Linear(width, channels)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.group_norm(x) if self.group_norm is not None else x
        qkv = _pointwise(h, self.to_qkv)  # (N, H, W, 3 * width)
        h = attention(*qkv.flatten(1, 2).chunk(3, dim=-1), heads=self.heads)
        h = h.unflatten(1, x.shape[1:3])
        return _pointwise(h, self.to_out[0], residual=x, output_scale=self.output_scale)


def _pointwise(x: Tensor, linear: nn.Linear, **epilogue) -> Tensor:
    """A linear layer over the channels is a 1x1 convolution."""
    return conv2d(x, linear.weight[:, :, None, None], linear.bias, **epilogue)


class Downsample2D(nn.Module):
    """A 3x3 convolution of stride 2; diffusers' Downsample2D. Padding 0 means zeros right and below, as in DDPM."""

    def __init__(self, channels: int, padding: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3)
        self.padding: Padding = padding or (0, 1, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, stride=2, padding=self.padding)


class Upsample2D(nn.Module):
    """Nearest 2x, then a 3x3 convolution; diffusers' Upsample2D."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, upsample=True)


# Resampling without weights, of the rarer blocks: plain channels-last torch.


def average_down(x: Tensor) -> Tensor:
    """Mean of 2 x 2 pixels; diffusers' Downsample2D(use_conv=False)."""
    return F.avg_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1).contiguous()


def nearest_up(x: Tensor) -> Tensor:
    """Each pixel 2 x 2 times; diffusers' Upsample2D(use_conv=False)."""
    return x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)


def fir_down(x: Tensor, pad: str = "constant") -> Tensor:
    """Blur with (1, 3, 3, 1), keep every second pixel; diffusers' FirDownsample2D, with "reflect" its KDownsample2D."""
    x = F.pad(x.permute(0, 3, 1, 2), (1, 1, 1, 1), pad)
    return F.conv2d(x, _fir_kernel(x), stride=2, groups=x.shape[1]).permute(0, 2, 3, 1).contiguous()


def fir_up(x: Tensor, pad: str = "constant") -> Tensor:
    """The transpose of `fir_down`, at gain 4; diffusers' FirUpsample2D, with "reflect" its KUpsample2D."""
    x = F.pad(x.permute(0, 3, 1, 2), (1, 1, 1, 1), pad)
    y = F.conv_transpose2d(x, 4 * _fir_kernel(x), stride=2, padding=3, groups=x.shape[1])
    return y.permute(0, 2, 3, 1).contiguous()


def _fir_kernel(x: Tensor) -> Tensor:
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], device=x.device) / 8
    return torch.outer(taps, taps).to(x.dtype).expand(x.shape[1], 1, 4, 4)
