"""The models as the sampling loop and the decoding of latents see them.

The loop draws with any model that fits `DenoiserLike`: `models.denoiser.Denoiser` is the base of ours.
"""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.models.blocks.conditioning import Conditioning, Prompt


class DenoiserLike(Protocol):
    """The model that is called at each step."""

    joins_halves: ClassVar[bool]  # on the CPU: a guided picture's halves are one call, by all threads
    conditioning_width: int  # of its Conditioning's temb

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def embed(self, timesteps: Tensor, class_labels: Tensor | None, prompt: Prompt | None) -> Tensor:
        """Return a Conditioning's temb, (M, conditioning_width), of timesteps (M,)."""
        ...

    def project(self, prompt: Prompt) -> tuple[Tensor, ...]:
        """Return a Conditioning's text."""
        ...

    def predict(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """Return (N, H, W, C_out) of x (N, H, W, C_in), contiguous; the conditioning has N entries, or one for all."""
        ...

    def graphed(self, name: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` of tensors, through CUDA graphs where there can be any."""
        ...


class DecoderLike(Protocol):
    """The model that makes pictures of latents."""

    config: AutoencoderKLConfig

    def decode(self, z: Tensor) -> tuple[Tensor]:
        """Return the pictures (N, C, H, W) of latents z (N, C, h, w)."""
        ...
