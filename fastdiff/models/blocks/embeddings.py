"""Embeddings of timesteps."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.kernels.linear import linear
from fastdiff.models.blocks.layers import ACTIVATIONS


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
    """Random Fourier features of noise levels or of their logarithms, score SDE (arXiv 2011.13456).

    diffusers' class of this name.
    """

    def __init__(self, width: int, *, scale: float = 16.0, log: bool = True, flip_sin_to_cos: bool = False):
        super().__init__()
        self.log, self.flip_sin_to_cos = log, flip_sin_to_cos
        self.weight = nn.Parameter(torch.randn(width) * scale, requires_grad=False)

    def forward(self, timesteps: Tensor) -> Tensor:
        """(N,) -> (N, 2 * width)."""
        levels = torch.log(timesteps) if self.log else timesteps
        angles = levels[:, None] * self.weight * 2 * math.pi
        return torch.cat([angles.cos(), angles.sin()] if self.flip_sin_to_cos else [angles.sin(), angles.cos()], dim=-1)


class TimestepEmbedding(nn.Module):
    """Linear, activation, Linear; diffusers' TimestepEmbedding."""

    def __init__(self, in_channels: int, width: int, out_channels: int | None = None, activation: str = "silu"):
        super().__init__()
        self.activation = activation
        self.linear_1 = nn.Linear(in_channels, width)
        self.linear_2 = nn.Linear(width, out_channels or width)

    def forward(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        return each_through(activate(each_through(x, self.linear_1)), self.linear_2)


def each_through(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return x (M, C_in) through a linear layer; the bits of each of the M depend on no other."""
    return linear(x[None], layer.weight, layer.bias)[0]
