"""Noise of a run, by the pictures' seeds or by a generator: what it starts from, and what its steps add."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.execution.transfers import upload

Generators = Generator | list[Generator]  # of a whole batch, or of each picture

# Where the noise of the steps comes from: each picture's seed (N,) int64, for the Philox noise of `kernels.denoise`, or
# a function that draws the next step's, (N, H, W, C).
NoiseSource = Tensor | Callable[[], Tensor]


@dataclass(frozen=True)
class Noise:
    """The noise of a run's pictures: by their seeds, or by a generator in the order of diffusers' pipelines."""

    seeds: Sequence[int]  # one a picture
    shape: Sequence[int]  # of one picture, (C, H, W)
    generator: Generators | None
    device: torch.device
    dtype: torch.dtype  # that a generator draws in; seeds are drawn in float32

    def start(self, latents: Tensor | None = None) -> Tensor:
        """Return x_T (N, H, W, C) float32: `latents` (N, C, H, W) where they are given, else unit normal noise.

        A seed draws its picture by a CPU generator of its own, so that it is the same in any batch and on any device.
        Raises InputError as `randn_tensor`.
        """
        if latents is not None:
            noise = latents.detach().to(self.device)
        elif self.generator is not None:
            noise = self._draw()
        else:
            each = [torch.randn(tuple(self.shape), generator=Generator("cpu").manual_seed(seed)) for seed in self.seeds]
            noise = upload(torch.stack(each), self.device)
        return noise.float().permute(0, 2, 3, 1).contiguous()

    def of_steps(self, dtype: torch.dtype | None = None) -> NoiseSource:
        """Return where the noise that steps add comes from; `dtype`: a generator's, None: as the start."""
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
    """Return unit normal noise of `shape` (N, ...), drawn in the order of diffusers' function of this name.

    One generator draws the whole batch, a list one picture each; CPU generators draw on the CPU for any device.
    Raises InputError as `check_generators`, and where a list has not one generator a picture.
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
