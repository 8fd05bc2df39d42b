"""UniPCMultistepScheduler: predictor and corrector, called as diffusers' class. Its rows: `samplers/unipc.py`."""

import torch
from torch import Tensor

from fastdiff.diffusion.configs import UniPCConfig
from fastdiff.diffusion.samplers.unipc import unipc_rows, unipc_schedule, unipc_sigmas
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.counted import NoiselessScheduler
from fastdiff.diffusion.schedulers.sigma import VariancePreservingScheduler
from fastdiff.diffusion.timesteps import checked_steps


class UniPCMultistepScheduler(VariancePreservingScheduler, NoiselessScheduler):
    """Predictor and corrector (Zhao et al. 2023), called as diffusers' class of this name. Its options: UniPCConfig."""

    config_class = UniPCConfig
    multistep = True
    returns_x0 = False
    _options: UniPCConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the number of steps of a run. Raises InputError for one that the training does not have."""
        steps = checked_steps(self._options, num_inference_steps)
        self._choose(*unipc_sigmas(self._options, self.alphas_cumprod, steps), device)

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return unipc_schedule(self._options, num_inference_steps)

    def _make_table(self, begin: int) -> Tensor:
        return unipc_rows(self._options, self.sigmas, begin)
