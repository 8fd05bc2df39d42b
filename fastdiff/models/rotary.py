"""The angles by which rotary embeddings turn channels (Su et al. 2021, arXiv 2104.09864); see `kernels.rotary`."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
