"""RMSNorm: the norm of Z-Image and of Qwen3 (Zhang and Sennrich 2019, arXiv 1910.07467)."""

import torch
from torch import Tensor, nn

from fastdiff.kernels.layer_norm import layer_norm


class RMSNorm(nn.Module):
    """The weight of an RMSNorm; diffusers' class of this name, and transformers' Qwen3RMSNorm."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(N, L, C) -> (N, L, C)."""
        normed = layer_norm(x, self.weight, eps=self.eps, rms=True)
        assert isinstance(normed, Tensor)
        return normed

    def added(self, branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of branch + x, and that sum, (N, L, C) each."""
        normed = layer_norm(branch, self.weight, eps=self.eps, rms=True, residual=x)
        assert isinstance(normed, tuple) and isinstance(normed[0], Tensor)
        return normed[0], normed[1]
