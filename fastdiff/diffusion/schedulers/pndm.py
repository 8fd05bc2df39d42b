"""PNDMScheduler: a linear multistep method, called as diffusers' class of this name. Its rows: `samplers/pndm.py`."""

import torch
from torch import Tensor

from fastdiff.diffusion.configs import PNDMConfig
from fastdiff.diffusion.samplers.pndm import keeps_output, pndm_rows, pndm_schedule, pndm_timesteps
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.counted import NoiselessScheduler
from fastdiff.schema import checked


class PNDMScheduler(NoiselessScheduler):
    """A linear multistep method (Liu et al. 2022), called as diffusers' PNDMScheduler. Its options: PNDMConfig."""

    config_class = PNDMConfig
    multistep = True
    returns_x0 = False
    _options: PNDMConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the number of steps of a run; it makes one call more. InputError for one the training has not."""
        timesteps = pndm_timesteps(self._options, num_inference_steps)
        self._begin_run(timesteps, device)
        self.num_inference_steps = checked("num_inference_steps", num_inference_steps, int)

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return pndm_schedule(self._options, num_inference_steps)

    def _make_table(self, begin: int) -> Tensor:
        steps = self.num_inference_steps or len(self.timesteps)
        return pndm_rows(self._options, self.alphas_cumprod, self.timesteps.cpu(), steps, begin)

    def _keeps(self, index: int, begin: int) -> bool:
        return keeps_output(index - begin)
