"""The starting noise of a run and the noise that its steps add, from the pictures' seeds or from a generator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.execution.transfers import upload

Generators = Generator | list[Generator]  # one for the batch, or one per picture

# The source of the steps' noise: the pictures' seeds (N,) int64, for the Philox noise of `kernels.denoise`, or a
# function that draws the noise of the next step, (N, H, W, C).
NoiseSource = Tensor | Callable[[], Tensor]


@dataclass(frozen=True)
class Noise:
    """The noise of a run's pictures, from their seeds, or from a generator in the order of diffusers' pipelines."""

    seeds: Sequence[int]  # one per picture
    shape: Sequence[int]  # of one picture, (C, H, W)
    generator: Generators | None
    device: torch.device
    dtype: torch.dtype  # in which a generator draws; noise from seeds is drawn in float32

    def start(self, latents: Tensor | None = None) -> Tensor:
        """Return x_T (N, H, W, C) float32: `latents` (N, C, H, W) if given, else standard normal noise.

        Each seed has its own CPU generator, so a picture's noise is the same in any batch and on any device. Raises the
        InputErrors of `randn_tensor`.
        """
        if latents is not None:
            noise = latents.detach().to(self.device)
        elif self.generator is not None:
            noise = self._draw()
        else:
            each = [torch.randn(tuple(self.shape), generator=Generator("cpu").manual_seed(seed)) for seed in self.seeds]
            noise = upload(torch.stack(each), self.device)
        return noise.float().permute(0, 2, 3, 1).contiguous()

    def in_turn(self) -> "Noise":
        """Return a noise whose draws continue one another, as a generator's draws do.

        Each seed becomes a CPU generator. So the starting noise has the bits of `start`, if it is drawn first.
        """
        if self.generator is not None:
            return self
        generators = [Generator("cpu").manual_seed(seed) for seed in self.seeds]
        return replace(self, generator=generators, dtype=torch.float32)

    def of_steps(self, dtype: torch.dtype | None = None) -> NoiseSource:
        """Return the source of the steps' noise. A generator draws in `dtype`; None: the starting noise's."""
        if self.generator is None:
            return upload(self.seeds, self.device)
        return lambda: self._draw(dtype).permute(0, 2, 3, 1)

    def _draw(self, dtype: torch.dtype | None = None) -> Tensor:
        return randn_tensor((len(self.seeds), *self.shape), self.generator, self.device, dtype or self.dtype)


def check_generators(generator: Any, device: torch.device) -> None:
    """Raise InputError unless `generator` is None, a generator that can draw for `device`, or a list of them."""
    generators = generator if isinstance(generator, list) else [generator]
    if generator is None:
        return
    if not generators or not all(isinstance(each, Generator) for each in generators):
        raise InputError(f"generator: {shown(generator)} is neither a torch.Generator nor a list of them")
    for each in generators:
        if each.device.type not in ("cpu", device.type):
            raise InputError(f"the generator is on {each.device} and the pictures are on {device}; use a CPU generator")


def randn_tensor(
    shape: Sequence[int],
    generator: Generators | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Return standard normal noise of `shape` (N, ...), drawn in the order of diffusers' function of this name.

    A single generator draws the whole batch; a list has one generator for each picture. CPU generators draw on the CPU
    and the noise moves to `device`. Raises the InputErrors of `check_generators`, and InputError if a list does not
    have one generator per picture.
    """
    check_generators(generator, device)
    generators = generator if isinstance(generator, list) else [generator]
    if len(generators) == 1:
        return _randn(shape, generators[0], device, dtype)
    if len(generators) != shape[0]:
        raise InputError(f"generator lists {len(generators)} generators for {shape[0]} pictures; give one for each")
    return torch.cat([_randn((1, *shape[1:]), each, device, dtype) for each in generators])


def _randn(shape: Sequence[int], generator: Generator | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    drawn_on = device if generator is None else generator.device
    return torch.randn(tuple(shape), generator=generator, device=drawn_on, dtype=dtype).to(device)
