"""PNDMScheduler: a linear multistep method, called as diffusers' class of this name. Its rows: `samplers/pndm.py`."""

import torch
from torch import Tensor

from fastdiff.diffusion.configs import PNDMConfig
from fastdiff.diffusion.samplers.pndm import keeps_output, pndm_rows, pndm_schedule, pndm_timesteps
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.base import Scheduler, SchedulerOutput
from fastdiff.diffusion.schedulers.sigma import SigmaScheduler
from fastdiff.schema import checked


class PNDMScheduler(SigmaScheduler):
    """A linear multistep method (Liu et al. 2022), called as diffusers' PNDMScheduler. Its options: PNDMConfig."""

    config_class = PNDMConfig
    multistep = True
    returns_x0 = False
    _options: PNDMConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the number of steps of a run; it makes one call more. InputError for one the training has not."""
        timesteps = pndm_timesteps(self._options, num_inference_steps)
        self._choose(timesteps, self.sigmas, device)
        self.num_inference_steps = checked("num_inference_steps", num_inference_steps, int)

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return pndm_schedule(self._options, num_inference_steps)

    def _make_table(self, begin: int) -> Tensor:
        steps = self.num_inference_steps or len(self.timesteps)
        return pndm_rows(self._options, self.alphas_cumprod, self.timesteps.cpu(), steps, begin)

    def _keeps(self, index: int, begin: int) -> bool:
        return keeps_output(index - begin)

    def step(
        self, model_output: Tensor, timestep: float | Tensor, sample: Tensor, return_dict: bool = True
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Return x_{t-1} and x0 of x_t and the model output, both (N, C, ...) of any float dtype.

        Raises InputError naming a timestep that is not of the run, or a tensor of a wrong kind, shape or dtype.
        """
        self._checked_index(timestep, sample, None, return_dict, model_output)
        return self._take(model_output, sample, None, return_dict)

    add_noise = Scheduler.add_noise
