"""DPM2 with ancestral steps, as in diffusers' KDPM2AncestralDiscreteScheduler.

A step calls the model twice, as in dpm2.py, but goes past the next sigma down to sigma_down. It then adds noise of
standard deviation sigma_up. `euler_ancestral.py` has the formulas of both. The second call is at the geometric mean of
this sigma and sigma_down.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from fastdiff.samplers.dpm2 import DPM2Config, DPM2Sigmas, TwoCallScheduler, log_middle
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.scheduler import SchedulerOutput


@dataclass(frozen=True, kw_only=True)
class DPM2AncestralConfig(DPM2Config):
    """The options of diffusers' KDPM2AncestralDiscreteScheduler."""


class KDPM2AncestralDiscreteScheduler(TwoCallScheduler):
    """DPM2 with ancestral steps, with the interface of diffusers' `KDPM2AncestralDiscreteScheduler`.

    `DPM2AncestralConfig` lists its options, which have diffusers' names and defaults. Each step but the last calls the
    model twice, so a run of n steps has 2n - 1 `timesteps`.
    """

    names: ClassVar = {
        "dpm2-a": {},
        "dpm2-a-karras": {"use_karras_sigmas": True, "use_exponential_sigmas": False, "use_beta_sigmas": False},
    }
    a1111_names: ClassVar = {"dpm2-a": "DPM2 a"}
    place: ClassVar = 6.2
    config_class = DPM2AncestralConfig

    def _make_levels(self, sigmas: Tensor) -> DPM2Sigmas:
        start, end = sigmas[:-1], sigmas[1:]
        # in float32 and in this order, as in diffusers, because the difference cancels
        up = (end**2 * (start**2 - end**2) / start**2) ** 0.5
        down = (end**2 - up**2) ** 0.5
        down = torch.where(down > 0, down, end**2 / start)  # the same, where float32 leaves nothing of it
        return DPM2Sigmas(start, log_middle(start, down), down, up)

    def _draws(self, index: int) -> bool:
        return index % 2 == 1

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Take one call's part of a step: return `x_{t-1}` and the predicted `x0`, both (N, C, ...).

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            generator: Draws the noise of second calls: one generator for the batch, or a list with one for each
                picture.
            return_dict: Return a `SchedulerOutput` instead of a plain tuple.

        Raises InputError that names a timestep outside the run, or a tensor of a wrong type, shape or dtype.
        """
        index = self._checked_index(timestep, sample, generator, return_dict, model_output)
        noise = None
        if self._draws(index):
            noise = randn_tensor(model_output.shape, generator, sample.device, model_output.dtype)
        return self._take(model_output, sample, noise, return_dict)
