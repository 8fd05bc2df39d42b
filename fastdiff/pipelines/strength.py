"""The strength of image to image: how many of a run's steps are taken."""

from dataclasses import dataclass

from torch import Tensor

from fastdiff.errors import InputError


@dataclass(frozen=True)
class Strength:
    """Begins a run so that it takes `min(int(N * strength), N)` of N steps, as diffusers' image-to-image pipelines do.

    SDEdit (Meng et al. 2021, arXiv 2108.01073) calls this choice t_0.
    """

    value: float  # 0 to 1

    def begin(self, timesteps: Tensor, steps: int, order: int) -> int:
        """Return the index of the first model call of a run over timesteps (calls,), with `order` calls a step.

        Raises InputError if no step is left.
        """
        taken = min(int(steps * self.value), steps)
        first = (steps - taken) * order
        if taken < 1 or first >= len(timesteps):
            raise InputError(f"strength: {self.value:g} of {steps} steps leaves none; raise it, or take more steps")
        return first


@dataclass(frozen=True)
class FlowStrength:
    """Begins a run at step `int(N - N * strength)` of N steps, as diffusers' ZImageImg2ImgPipeline does."""

    value: float  # 0 to 1

    def begin(self, timesteps: Tensor, steps: int, order: int) -> int:
        """As `Strength.begin`."""
        first = int(steps - min(steps * self.value, steps)) * order
        if first >= len(timesteps):
            raise InputError(f"strength: {self.value:g} of {steps} steps leaves none; raise it, or take more steps")
        return first
