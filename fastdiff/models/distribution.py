"""The distribution that an encoder gives: a mean and a variance for each number of a picture's latents."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.errors import InputError

Generators = torch.Generator | Sequence[torch.Generator]


class DiagonalGaussianDistribution:
    """Independent normal distributions; diffusers' class of this name.

    parameters: (N, 2 C, h, w), the means, then the logarithms of the variances, which count from -30 to 20. `mean`,
    `std`, `var` and `logvar` are (N, C, h, w).
    """

    def __init__(self, parameters: Tensor):
        self.parameters = parameters
        self.mean, logvar = parameters.chunk(2, dim=1)
        self.logvar = logvar.clamp(-30.0, 20.0)
        self.std = torch.exp(0.5 * self.logvar)
        self.var = torch.exp(self.logvar)

    def mode(self) -> Tensor:
        """Return the latents that are the most likely, (N, C, h, w)."""
        return self.mean

    def sample(self, generator: Generators | None = None) -> Tensor:
        """Return latents (N, C, h, w), their noise drawn as diffusers draws it: of one generator or one a picture."""
        shape = self.mean.shape
        if generator is None or isinstance(generator, torch.Generator):
            return self.mean + self.std * self._noise(shape, generator)
        if not isinstance(generator, list | tuple) or not all(isinstance(one, torch.Generator) for one in generator):
            raise InputError(f"generator: {shown(generator)} is none; give a torch.Generator, or a list of them")
        if len(generator) != shape[0]:
            raise InputError(f"generator: {len(generator)} given for {shape[0]} pictures; give one for each")
        return self.mean + self.std * torch.cat([self._noise((1, *shape[1:]), one) for one in generator])

    def _noise(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        device = self.mean.device if generator is None else generator.device
        return torch.randn(shape, generator=generator, device=device, dtype=self.mean.dtype).to(self.mean.device)
