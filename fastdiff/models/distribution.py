"""The distribution of latents that an encoder returns: a mean and a variance for each element."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.errors import InputError

Generators = torch.Generator | Sequence[torch.Generator]


class DiagonalGaussianDistribution:
    """Independent normal distributions of latents; diffusers' class of this name.

    `mean`, `std`, `var` and `logvar` are (N, C, h, w).

    Args:
        parameters: (N, 2 C, h, w), the means, then the logarithms of the variances, which are clamped to [-30, 20].
    """

    def __init__(self, parameters: Tensor):
        self.parameters = parameters
        self.mean, logvar = parameters.chunk(2, dim=1)
        self.logvar = logvar.clamp(-30.0, 20.0)
        self.std = torch.exp(0.5 * self.logvar)
        self.var = torch.exp(self.logvar)

    def mode(self) -> Tensor:
        """Return the most likely latents (N, C, h, w)."""
        return self.mean

    def sample(self, generator: Generators | None = None) -> Tensor:
        """Draw latents (N, C, h, w).

        Noise is drawn as in diffusers. `generator` is one torch.Generator, or a list of one per picture.
        """
        shape = self.mean.shape
        if generator is None or isinstance(generator, torch.Generator):
            return self.mean + self.std * self._noise(shape, generator)
        if not isinstance(generator, list | tuple) or not all(isinstance(one, torch.Generator) for one in generator):
            raise InputError(
                f"generator: {shown(generator)} is not a generator; give a torch.Generator, or a list of them"
            )
        if len(generator) != shape[0]:
            raise InputError(f"generator: {len(generator)} given for {shape[0]} pictures; give one for each")
        return self.mean + self.std * torch.cat([self._noise((1, *shape[1:]), one) for one in generator])

    def _noise(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        device = self.mean.device if generator is None else generator.device
        return torch.randn(shape, generator=generator, device=device, dtype=self.mean.dtype).to(self.mean.device)
