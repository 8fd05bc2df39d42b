"""Autoencoder: the base class of the models that encode pictures to latents and decode latents to pictures."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastdiff.checkpoints.configs.autoencoder import AutoencoderConfig
from fastdiff.errors import InputError
from fastdiff.execution.cpu_workers import map_in_turn
from fastdiff.execution.tensors import FLOATS, beside, tensor
from fastdiff.models.model import AnyModel, Model

# The most pixels that a GPU computes at once in 16 bits, unless a single picture has more. A picture's bits do not
# depend on its batch, so this only bounds memory. Chosen, not measured: one picture of 1024 x 1024, or 16 of 256 x 256.
PIXELS_AT_ONCE = 1024 * 1024

Half = Callable[[Any, Tensor], Tensor]  # the encoder or the decoder of a model, over (N, H, W, C)


class Autoencoder(Model):
    """The base class of AutoencoderKL and AutoencoderTiny. A picture has the same bits in any batch."""

    config: AutoencoderConfig
    use_slicing = False  # whether a GPU computes one picture at a time

    def encode(self, x: Tensor) -> Any:
        """Encode pictures (N, C_in, H, W): a tuple of their latents, or of the distribution of their latents."""
        raise NotImplementedError

    def decode(self, z: Tensor) -> Any:
        """Decode latents (N, C, h, w) to pictures (N, C_out, H, W): a tuple of them."""
        raise NotImplementedError

    def _decode(self, z: Tensor) -> Tensor:
        """(N, h, w, C) -> (N, H, W, C_out)."""
        raise NotImplementedError

    def _in_turn(self, half: Half, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Run the encoder or decoder on x (N, H, W, C) in `dtype`, as many pictures at a time as their size allows."""
        x = x.to(dtype)
        if self.device.type != "cuda":
            return torch.cat(list(map_in_turn(partial(half, self._of(dtype)), x)))
        run = self.graphed((half, dtype), lambda part: half(self._of(dtype), part))
        return torch.cat([run(part) for part in x.split(self._at_once(half, x))])

    def _at_once(self, half: Half, x: Tensor) -> int:
        """Return how many of these pictures a GPU computes at a time."""
        if self.use_slicing:
            return 1
        if x.dtype.itemsize > 2:  # torch's attention runs there, and its bits may depend on the batch
            return 1
        scale = self.config.scale if half is type(self)._decode else 1
        return max(1, PIXELS_AT_ONCE // (scale**2 * x.shape[1] * x.shape[2]))

    def _of(self: AnyModel, dtype: torch.dtype) -> AnyModel:
        """Return this model with weights in `dtype`: a new copy at each use, so that it follows changes of weights."""
        return self if dtype == self.dtype else copy.deepcopy(self).to(dtype)

    def _check(self, name: str, x: Any, channels: int, least: int) -> None:
        tensor(name, x, FLOATS)
        beside(name, x, self.device)
        if x.ndim != 4 or x.shape[1] != channels or not x.numel():
            raise InputError(f"{name}: expected (N, {channels}, H, W), got {tuple(x.shape)}")
        if min(x.shape[2:]) < least:
            raise InputError(f"{name}: {x.shape[2]} x {x.shape[3]} is too small; each side must be at least {least}")
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{name}: it requires grad, and this model is for inference only; call it on {name}.detach()"
            )
