"""Parts of a run: SDXL's base model takes the first steps, and its refiner goes on from its latents.

As `denoising_end` and `denoising_start` of diffusers' StableDiffusionXLPipeline and StableDiffusionXLImg2ImgPipeline.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.kinds import Fraction
from fastdiff.samplers.shared.schedule import Schedule
from fastdiff.schema import checked


@dataclass(frozen=True)
class PartOptions:
    """The arguments that choose a part of a run, 0 to 1: the share of the trained timesteps that is behind it."""

    denoising_start: float | None = None
    denoising_end: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            checked(name, value, Fraction | None)
        start, end = self.denoising_start, self.denoising_end
        if start is not None and end is not None and start >= end:
            raise InputError(f"denoising_end: {end} is not after denoising_start, {start}; give a larger number")

    def check_unused(self) -> None:
        """Raise InputError if a part is chosen, for a model that draws whole pictures."""
        given = [name for name, value in vars(self).items() if value is not None]
        if given:
            raise InputError(f"{given[0]}: only SDXL takes it; leave it out")

    def begins(self, num_train_timesteps: int) -> "DenoisingStart | None":
        """Return what begins the run; None without `denoising_start`."""
        return None if self.denoising_start is None else DenoisingStart(self.denoising_start, num_train_timesteps)

    def ended(self, schedule: Schedule, num_train_timesteps: int) -> Schedule:
        """Return the steps before `denoising_end`. Raises InputError if there is none."""
        if self.denoising_end is None:
            return schedule
        cutoff = _cutoff(self.denoising_end, num_train_timesteps)
        count = int((schedule.timesteps >= cutoff).sum())
        if count == 0:
            raise InputError(f"denoising_end: {self.denoising_end} leaves no step; give a larger number")
        return schedule.first(count)


@dataclass(frozen=True)
class DenoisingStart:
    """Begins a run at a share of the trained timesteps. Its input has the noise of that timestep already."""

    share: float
    num_train_timesteps: int

    def begin(self, timesteps: Tensor, steps: int, order: int) -> int:
        """Return the index of the first model call; see `samplers.shared.schedule.Begin`.

        Raises InputError if no step is left.
        """
        taken = int((timesteps < _cutoff(self.share, self.num_train_timesteps)).sum())
        if taken == 0:
            raise InputError(f"denoising_start: {self.share} leaves no step; give a smaller number")
        if order == 2 and taken % 2 == 0:  # begin with the first of a step's two calls
            taken += 1
        return len(timesteps) - taken


def _cutoff(share: Any, num_train_timesteps: int) -> int:
    return round(num_train_timesteps - share * num_train_timesteps)
