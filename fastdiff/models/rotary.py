"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864): each pair of channels is turned by its position."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Turned = Callable[[Tensor, Tensor, Tensor], Tensor]


def frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """Return the angle per position of each pair of channels, (width / 2,) float64: theta ** (-2 i / width)."""
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def axis_tables(positions: Tensor, widths: Sequence[int], theta: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles of tokens that have a position on each of several axes.

    Args:
        positions: (L, axes) whole numbers.
        widths: the number of channels of a head that each axis turns. They are side by side, in this order.
        theta: the base of the frequencies.

    Returns:
        Two tables (L, d / 2) float32, for heads of d = sum(widths) channels.
    """
    columns = [
        positions[:, axis, None].double() * frequencies(width, theta, positions.device)
        for axis, width in enumerate(widths)
    ]
    angles = torch.cat(columns, dim=1).float()  # rounded before the cosine, as in diffusers
    return angles.cos(), angles.sin()


def turned_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., L, heads, d) float32 with channels 2 i and 2 i + 1 turned by an angle, as in diffusers' Z-Image.

    cos, sin: of the angles, (..., L, d / 2) float32.
    """
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


def turned_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., L, heads, d) float32 with channels i and i + d / 2 turned by an angle, as transformers does.

    cos, sin: of the angles, (..., L, d / 2) float32.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def positioned(x: Tensor, weight: Tensor | None, eps: float, turned: Turned, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys after RMSNorm and rotary embedding, both in float32, rounded once.

    Args:
        x: (N, L, heads, d).
        weight: of the RMSNorm of each head, (d,); None for no norm.
        eps: of the RMSNorm.
        turned: `turned_pairs` or `turned_halves`.
        cos, sin: as `turned` reads them.

    Returns:
        (N, L, heads, d), the dtype of x.
    """
    rows = x.float()
    if weight is not None:
        rows = F.rms_norm(rows, rows.shape[-1:], weight.float(), eps)
    return turned(rows, cos, sin).to(x.dtype)
