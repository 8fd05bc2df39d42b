"""LMSDiscreteScheduler: a linear multistep method, called as diffusers' class. Its rows: `samplers/lms.py`."""

import torch
from torch import Tensor

from fastdiff.diffusion.configs import LMSConfig
from fastdiff.diffusion.samplers.lms import ORDER, lms_rows, lms_schedule
from fastdiff.diffusion.samplers.sigmas import float_sigmas, float_timesteps
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.base import SchedulerOutput
from fastdiff.diffusion.schedulers.sigma import ScaledScheduler
from fastdiff.diffusion.timesteps import checked_steps
from fastdiff.schema import checked, whole


class LMSDiscreteScheduler(ScaledScheduler):
    """A linear multistep method over sigmas, called as diffusers' class of this name. Its options: LMSConfig."""

    config_class = LMSConfig
    multistep = True
    rounds_to_output = False
    _options: LMSConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the number of steps of a run. Raises InputError for one that the training does not have."""
        timesteps = float_timesteps(self._options, checked_steps(self._options, num_inference_steps))
        self._choose(*float_sigmas(self._options, self.alphas_cumprod, timesteps), device)

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return lms_schedule(self._options, num_inference_steps)

    def _make_table(self, begin: int) -> Tensor:
        return lms_rows(self._options, self.sigmas)

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        order: int = ORDER,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Return x_{t-1} and x0 of x_t and the model output, both (N, C, ...) of any float dtype.

        `order` is the most outputs that the step reads, its own among them. Raises InputError for one that is not from
        1 to 4, a timestep that is not of the run, or a tensor of a wrong kind, shape or dtype.
        """
        order = checked("order", order, whole(1, ORDER))
        index = self._checked_index(timestep, sample, None, return_dict, model_output)
        row = None if order == ORDER else lms_rows(self._options, self.sigmas, order)[index].to(sample.device)
        return self._take(model_output, sample, None, return_dict, row)
