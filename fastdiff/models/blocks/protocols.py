"""The interfaces of models in the sampling loop and in decoding latents.

The loop draws with any model that fits `DenoiserLike`. `models.denoiser.Denoiser` is the base class of fastdiff's own.
"""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fastdiff.checkpoints.configs.autoencoder import AutoencoderConfig
from fastdiff.models.blocks.conditioning import Conditioning, Prompt


class DenoiserLike(Protocol):
    """The model that is called at each step."""

    joins_halves: ClassVar[bool]  # on the CPU: run both halves of a guided picture as one batch
    conditioning_width: int  # of `Conditioning.temb`

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def embed(self, timesteps: Tensor, class_labels: Tensor | None, prompt: Prompt | None) -> Tensor:
        """Return `Conditioning.temb` (M, conditioning_width) for timesteps (M,)."""
        ...

    def project(self, prompt: Prompt) -> tuple[Tensor, ...]:
        """Return `Conditioning.text`."""
        ...

    def predict(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the prediction (N, H, W, C_out), contiguous, for x (N, H, W, C_in).

        The conditioning has N entries, or one for all.
        """
        ...

    def graphed(self, name: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, which takes tensors, run through CUDA graphs if possible."""
        ...


class DecoderLike(Protocol):
    """The model that decodes latents to pictures."""

    config: AutoencoderConfig

    def decode(self, z: Tensor) -> tuple[Tensor]:
        """Decode latents z (N, C, h, w) to pictures (N, C, H, W)."""
        ...
