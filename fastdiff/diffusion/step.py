"""A step of the loop as a function of tensors, and guidance whose result is limited.

Each picture is limited on its own, so its bits do not depend on its batch.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.diffusion.shared_steps import Constants
from fastdiff.kernels.denoise import StepOptions, denoise_step
from fastdiff.kernels.scale_input import scale_input
from fastdiff.models.blocks.conditioning import Conditioning
from fastdiff.models.blocks.protocols import DenoiserLike


@dataclass(frozen=True)
class Step:
    """A step as a function of tensors. Its fields are everything else that it depends on.

    A CUDA graph of the step keeps this object alive.
    """

    denoiser: DenoiserLike
    options: StepOptions
    is_guided: bool
    guidance_rescale: float
    most_norm: float

    @functools.cached_property
    def name(self) -> tuple[Any, ...]:
        """Everything that the step's graph depends on, besides the denoiser."""
        return tuple(value for key, value in vars(self).items() if key != "denoiser")

    def __call__(
        self,
        x_t: Tensor,
        step: Tensor,
        time: tuple[Tensor, Tensor],
        earlier: Tensor,
        constants: Constants,
        noise: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return x_{t-1}, x0 and the next step's `earlier`, from x_t (N, H, W, C).

        With guidance, one model call computes both halves; `time` and the text then have an entry for each picture of
        each.
        """
        rows, scale, text, inputs, control = constants
        x = with_inputs(scale_input(x_t, rows, step, self.denoiser.dtype, 1 + self.is_guided), *inputs)
        output, *unguided = self.denoiser.predict(x, Conditioning(*time, text), *control).split(len(x_t))
        return self.update(output, unguided[0] if unguided else None, x_t, rows, step, earlier, noise, scale)

    def update(
        self,
        output: Tensor,
        unguided: Tensor | None,
        x_t: Tensor,
        rows: Tensor,
        step: Tensor,
        earlier: Tensor | None,
        noise: Tensor | None,
        scale: Tensor,
    ) -> tuple[Tensor, ...]:
        if self.options.variance == "fixed":  # ignore a learned variance, as diffusers' DiTPipeline does
            channels = x_t.shape[-1]
            output, unguided = output[..., :channels], None if unguided is None else unguided[..., :channels]
        if unguided is not None and self.guidance_rescale:
            output, unguided = rescaled(output, unguided, scale, self.guidance_rescale), None
        if unguided is not None and self.most_norm:
            output, unguided = bounded(output, unguided, scale, self.most_norm), None
        return denoise_step(
            output, x_t, rows, self.options,
            unguided=unguided, guidance_scale=scale, noise=noise, step=step, earlier=earlier,
        )  # fmt: skip


def with_inputs(x: Tensor, *inputs: Tensor) -> Tensor:
    """Return a model's input (k, H, W, C) with constant channels (k, H, W, C') or (1, H, W, C') after its own."""
    return torch.cat([x, *(each.expand(len(x), -1, -1, -1) for each in inputs)], dim=-1) if inputs else x


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
