"""The latents that inpainting keeps: after each step they get the noise of the next one, as in diffusers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(eq=False)
class KnownPixels:
    """The latents outside the mask, on the model's device. It is a `loop.Known`."""

    painted: Tensor  # (N, H, W, 1) bool: where the mask is white, so that the model paints anew; float32 if it is grey
    latents: Tensor  # (N, H, W, C) float32, without noise
    noise: Tensor  # (N, H, W, C) float32, the noise that x_T began with
    shares: Sequence[tuple[float, float]]  # of the latents and of the noise in x_t, for each step

    @cached_property
    def _work(self) -> tuple[Tensor, Tensor]:
        return torch.empty_like(self.latents), torch.empty_like(self.latents)

    def of_rows(self, rows: list[int]) -> "KnownPixels":
        """Return the latents of some pictures of the batch."""
        return replace(self, painted=self.painted[rows], latents=self.latents[rows], noise=self.noise[rows])

    def begin(self, x_t: Tensor) -> Tensor:
        """Return x_t: it has all its noise, also where pixels are known."""
        return x_t

    def set_after(self, step: int, x: Tensor) -> None:
        """Set the known latents in x_{t-1} (N, H, W, C) in place, with the noise of the next step, or none at the end.

        Nothing is allocated after the first step.
        """
        if step + 1 < len(self.shares):
            blend_known(x, self.painted, self.latents, self.noise, *self.shares[step + 1], *self._work)
        else:
            _mix(x, self.painted, self.latents)

    def set_mask(self, mask: Tensor) -> None:
        """Replace the mask during a run, by one (N, H, W, 1) of values 0 to 1."""
        white = mask > 0
        self.painted = white if torch.equal(mask, white.to(mask)) else mask.float()


def blend_known(
    x: Tensor,
    painted: Tensor,
    latents: Tensor,
    noise: Tensor,
    signal: float,
    sigma: float,
    noised: Tensor,
    work: Tensor,
) -> None:
    """Set x to signal * latents + sigma * noise where it is not `painted`, in place. `noised` and `work` are like x.

    A grey mask mixes them.

    Products and sum are rounded each, so that the bits do not depend on the place in the batch.
    """
    torch.mul(latents, signal, out=noised)
    torch.mul(noise, sigma, out=work)
    _mix(x, painted, noised.add_(work))


def _mix(x: Tensor, painted: Tensor, known: Tensor) -> None:
    """Set x to `known` where it is not painted, in place."""
    if painted.dtype == torch.bool:
        torch.where(painted, x, known, out=x)
    else:
        x.mul_(painted).add_((1 - painted) * known)
