"""The strength of image to image: how many of a run's steps are taken."""

from dataclasses import dataclass

from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.requests.defaults import taken_steps


@dataclass(frozen=True)
class Strength:
    """Begins a run so that it takes the last steps, as diffusers' image-to-image pipelines do; see `taken_steps`.

    SDEdit (Meng et al. 2021, arXiv 2108.01073) calls this choice t_0.
    """

    value: float  # 0 to 1
    of_captions: bool = False  # whether the number of steps is rounded as in diffusers' ZImageImg2ImgPipeline

    def begin(self, timesteps: Tensor, steps: int, order: int) -> int:
        """Return the index of the first model call of a run over timesteps (calls,), with `order` calls a step.

        Raises InputError if no step is left.
        """
        taken = taken_steps(steps, self.value, of_captions=self.of_captions)
        first = (steps - taken) * order
        if taken < 1 or first >= len(timesteps):
            raise InputError(f"strength: {self.value:g} of {steps} steps leaves none; raise it, or take more steps")
        return first
