"""The leaves of the U-Net: convolution, norm, embeddings, resampling, attention. Pictures are (N, H, W, C) throughout.

Parameters are named as diffusers names them, except that an attention holds one fused projection `to_qkv`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.kernels._moments import Moments
from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import Norm, Padding, Shortcut, conv2d
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.linear import linear

ACTIVATIONS = {"silu": F.silu, "mish": F.mish, "gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True)
class Feature:
    """A picture inside the U-Net, with what its convolution knows of it for the norm that follows."""

    x: Tensor  # (N, H, W, C)
    moments: Moments | None = None


Picture = Feature | tuple[Feature, Feature]  # a pair is a skip connection that nobody concatenates


def tensors(x: Picture) -> Tensor | tuple[Tensor, Tensor]:
    return x.x if isinstance(x, Feature) else (x[0].x, x[1].x)


def join(x: Picture) -> Feature:
    """One feature, for the rare operations that cannot read a pair."""
    return x if isinstance(x, Feature) else Feature(torch.cat(tensors(x), dim=-1))


def normalise(x: Picture, norm: Norm) -> Feature:
    """`kernels.group_norm` with the statistics that x brings along."""
    moments = x.moments if isinstance(x, Feature) else (x[0].moments, x[1].moments)
    return Feature(group_norm(tensors(x), moments=moments, **norm._asdict()))


class Conv2d(nn.Conv2d):
    """torch's Conv2d over (N, H, W, C), with the epilogue of `kernels.conv2d`."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, bias: bool = True):
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=bias)

    def forward(
        self,
        x: Picture,
        *,
        padding: Padding | None = None,
        residual: Feature | None = None,
        shortcut: "tuple[Picture, Conv2d] | None" = None,
        norm: Norm | None = None,
        moments: bool = True,
        **options,
    ) -> Feature:
        """`shortcut`: a picture and its 1x1 convolution, to be added; `norm` follows; `moments`: for one later.

        The other options are those of `kernels.conv2d`.
        """
        padding = self.padding[0] if padding is None else padding
        if shortcut is not None:
            picture, layer = shortcut
            options["shortcut"] = Shortcut(tensors(picture), layer.weight, layer.bias)
        moments = moments and norm is None
        options |= {"padding": padding, "residual": residual.x if residual is not None else None, "norm": norm}
        y = conv2d(tensors(x), self.weight, self.bias, moments=moments, **options)
        return Feature(*y) if moments else Feature(y)


class GroupNorm(nn.GroupNorm):
    """torch's GroupNorm over (N, H, W, C), with the scale, shift and activation of `kernels.group_norm`."""

    def forward(self, x: Picture, **epilogue) -> Feature:
        return normalise(x, self.after(**epilogue))

    def after(self, **epilogue) -> Norm:
        """The same as a part of the convolution before it."""
        return Norm(self.num_groups, self.weight, self.bias, self.eps, **epilogue)


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
        return rows_through(F.silu(rows_through(x, self.linear_1)), self.linear_2)


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

    def forward(self, x: Feature) -> Feature:
        h = self.group_norm(x) if self.group_norm is not None else x
        qkv = linear(h.x.flatten(1, 2), self.to_qkv.weight, self.to_qkv.bias)  # (N, H * W, 3 * width)
        h = attention(*qkv.chunk(3, dim=-1), heads=self.heads).unflatten(1, x.x.shape[1:3])
        out = self.to_out[0]  # a 1x1 convolution, for the moments
        options = {"residual": x.x, "output_scale": self.output_scale, "moments": True}
        return Feature(*conv2d(h, out.weight[:, :, None, None], out.bias, **options))


def rows_through(x: Tensor, layer: nn.Linear) -> Tensor:
    """x (rows, C_in) through a linear layer; the bits of a row depend on no other row."""
    return linear(x[None], layer.weight, layer.bias)[0]


class Downsample2D(nn.Module):
    """A 3x3 convolution of stride 2; diffusers' Downsample2D. Padding 0 means zeros right and below, as in DDPM."""

    def __init__(self, channels: int, padding: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3)
        self.padding: Padding = padding or (0, 1, 0, 1)

    def forward(self, x: Feature) -> Feature:
        return self.conv(x, stride=2, padding=self.padding)


class Upsample2D(nn.Module):
    """Nearest 2x, then a 3x3 convolution; diffusers' Upsample2D."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3)

    def forward(self, x: Feature) -> Feature:
        return self.conv(x, upsample=True)


# Resampling without weights, of the rarer blocks: plain channels-last torch.


def average_down(feature: Feature) -> Feature:
    """Mean of 2 x 2 pixels; diffusers' Downsample2D(use_conv=False)."""
    return _channels_last(F.avg_pool2d(_channels_first(feature), 2))


def nearest_up(feature: Feature) -> Feature:
    """Each pixel 2 x 2 times; diffusers' Upsample2D(use_conv=False)."""
    return Feature(feature.x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2))


def fir_down(feature: Feature, pad: str = "constant") -> Feature:
    """Blur with (1, 3, 3, 1), keep every second pixel; diffusers' FirDownsample2D, with "reflect" its KDownsample2D."""
    x = F.pad(_channels_first(feature), (1, 1, 1, 1), pad)
    return _channels_last(F.conv2d(x, _fir_kernel(x), stride=2, groups=x.shape[1]))


def fir_up(feature: Feature, pad: str = "constant") -> Feature:
    """The transpose of `fir_down`, at gain 4; diffusers' FirUpsample2D, with "reflect" its KUpsample2D."""
    x = F.pad(_channels_first(feature), (1, 1, 1, 1), pad)
    return _channels_last(F.conv_transpose2d(x, 4 * _fir_kernel(x), stride=2, padding=3, groups=x.shape[1]))


def _channels_first(feature: Feature) -> Tensor:
    return feature.x.permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> Feature:
    return Feature(x.permute(0, 2, 3, 1).contiguous())


def _fir_kernel(x: Tensor) -> Tensor:
    # (1, 3, 3, 1) / 8, made on the device: a CUDA graph cannot copy it there
    taps = (4 - 2 * (torch.arange(4, device=x.device) - 1.5).abs()) / 8
    return torch.outer(taps, taps).to(x.dtype).expand(x.shape[1], 1, 4, 4)
