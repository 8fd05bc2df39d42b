"""Classifier-free guidance whose result is limited, each picture on its own, so its bits do not depend on its batch."""

import torch
from torch import Tensor


def _guided(output: Tensor, unguided: Tensor, scale: Tensor) -> Tensor:
    """Return the guided output (N, H, W, C) float32. `scale` is (N,) float32."""
    output, unguided = output.float(), unguided.float()
    return unguided + scale[:, None, None, None] * (output - unguided)


def rescaled(output: Tensor, unguided: Tensor, scale: Tensor, share: float) -> Tensor:
    """Return the guided output (N, H, W, C) float32, rescaled in part to the deviation of the conditional output.

    `scale` is (N,) float32. `share` is the part, 0 to 1 (Lin et al. 2024, arXiv 2305.08891, section 3.4).
    """
    output, guided = output.float(), _guided(output, unguided, scale)
    spreads = [(each.std(), its_guided.std()) for each, its_guided in zip(output, guided, strict=True)]
    factors = torch.stack([share * (before / after) + (1 - share) for before, after in spreads])
    return guided * factors[:, None, None, None]


def bounded(output: Tensor, unguided: Tensor, scale: Tensor, most: float) -> Tensor:
    """Return the guided output (N, H, W, C) float32, whose norm is at most `most` times the conditional output's.

    As `cfg_normalization` of diffusers' ZImagePipeline.
    """
    output, guided = output.float(), _guided(output, unguided, scale)
    norms = [(most * before.norm(), its_guided.norm()) for before, its_guided in zip(output, guided, strict=True)]
    one = torch.ones_like(scale[0])
    factors = torch.stack([torch.where(norm > bound, bound / norm, one) for bound, norm in norms])
    return guided * factors[:, None, None, None]
