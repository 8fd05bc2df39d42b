"""Find the training picture nearest to a sample, over all the shifted and scaled copies that training showed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.data import Augmenter


@dataclass(frozen=True)
class Neighbours:
    """The index of each sample's nearest training picture, and the distance to it."""

    distance: Tensor  # (N,) float32, root mean square over pixels and channels, on the scale 0 to 255
    index: Tensor  # (N,) int64


@torch.no_grad()
def nearest(images: Tensor, augmenter: Augmenter) -> Neighbours:
    """Return the nearest training pictures of images (N, 3, 64, 64) uint8 on the augmenter's device."""
    x = _ink(images)
    best = torch.full((len(x),), float("inf"), device=x.device)
    index = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    for frames, margin in zip(augmenter.frames, augmenter.margins.tolist(), strict=True):
        norms = _ink(frames).square().sum(dim=1)  # a shift over white keeps the norm
        for dy in range(margin + 1):
            for dx in range(margin + 1):
                y = _ink(frames.roll((dy, dx), dims=(2, 3)))
                squared, position = (norms - 2 * x @ y.T).min(dim=1)
                index = torch.where(squared < best, position, index)
                best = torch.minimum(best, squared)
    total = (best + x.square().sum(dim=1)).clamp(min=0)
    return Neighbours((total / x.shape[1]).sqrt(), index)


def _ink(images: Tensor) -> Tensor:
    """Return (N, 12288) float32 with white at 0: small norms cancel less in |x|^2 - 2 x.y + |y|^2."""
    return 255 - images.flatten(1).float()
