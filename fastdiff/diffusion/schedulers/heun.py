"""HeunDiscreteScheduler: two calls a step, called as diffusers' class of this name. Its rows: `samplers/heun.py`."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastdiff.diffusion.configs import HeunConfig
from fastdiff.diffusion.samplers.heun import heun_rows, heun_schedule, heun_sigmas
from fastdiff.diffusion.samplers.sigmas import float_timesteps
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.counted import NoiselessScheduler
from fastdiff.diffusion.schedulers.sigma import ScaledScheduler, check_chosen, numbers
from fastdiff.diffusion.timesteps import checked_steps
from fastdiff.errors import InputError


class HeunDiscreteScheduler(ScaledScheduler, NoiselessScheduler):
    """Heun's method (Karras et al. 2022), called as diffusers' HeunDiscreteScheduler. Its options: HeunConfig."""

    order = 2
    config_class = HeunConfig
    multistep = True
    rounds_to_output = False
    _options: HeunConfig

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        num_train_timesteps: int | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """Choose the steps of a run: their number, or custom timesteps; each but the last makes two calls.

        Raises InputError unless one of them is given, where the config's sigmas leave no choice of timesteps, and for
        a `num_train_timesteps` that is not the config's.
        """
        check_chosen(self._options, num_inference_steps=num_inference_steps, timesteps=timesteps)
        if num_train_timesteps not in (None, len(self)):
            raise InputError(f"num_train_timesteps: the config has {len(self)}; leave it out, or change the config's")
        if timesteps is None:
            chosen = float_timesteps(self._options, checked_steps(self._options, num_inference_steps))
        else:
            chosen = np.array(numbers("timesteps", timesteps), dtype=np.float32)
        self._choose(*heun_sigmas(self._options, self.alphas_cumprod, chosen), device)
        self.num_inference_steps = len(chosen)

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return heun_schedule(self._options, num_inference_steps)

    def _make_table(self, begin: int) -> Tensor:
        return heun_rows(self._options, self.sigmas, begin)
