"""The interfaces of models in the sampling loop and in decoding latents.

The loop draws with any model that fits `DenoiserLike`. `models.denoiser.Denoiser` is the base class of fastdiff's own.
"""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fastdiff.checkpoints.configs.autoencoder import AutoencoderConfig
from fastdiff.models.blocks.conditioning import Conditioning, Prompt


class MergingLike(Protocol):
    """The adapters in a model's weights: `fastdiff.adapters.merging.Merging`."""

    own_writes: int  # the writes to the model's parameters by the adapters, as `count_writes` counts

    @property
    def state(self) -> Hashable:
        """Identify what the adapters have made of the weights."""
        ...

    def as_loaded(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return a state dict of the model with the weights as they were loaded."""
        ...

    def write_again(self) -> None:
        """Merge all weights again, because the model's memory does not hold what was written last."""
        ...

    def follow_dtype(self) -> None:
        """Merge again from converted weights, if the model's dtype has changed."""
        ...


class DenoiserLike(Protocol):
    """The model that is called at each step."""

    joins_halves: ClassVar[bool]  # on the CPU: run both halves of a guided picture as one batch
    conditioning_width: int  # of `Conditioning.temb`

    @property
    def embeds_prompt(self) -> bool:
        """Whether `embed` reads the prompt."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def weights_state(self) -> Hashable:
        """Identify what adapters have made of the weights."""
        ...

    def embed(self, timesteps: Tensor, class_labels: Tensor | None, prompt: Prompt | None) -> Tensor:
        """Return `Conditioning.temb` (M, conditioning_width) for timesteps (M,). See `embeds_prompt`."""
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
