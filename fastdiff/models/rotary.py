"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864): each pair of channels is turned by its position."""

import torch
from torch import Tensor


def frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """Return the angle per position of each pair of channels, (width / 2,) float64: theta ** (-2 i / width)."""
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def turned_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., L, heads, d) float32 with channels i and i + d / 2 turned by an angle, as transformers does.

    cos, sin: of the angles, (L, d / 2) float32.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
