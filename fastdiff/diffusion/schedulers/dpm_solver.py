"""DPMSolverMultistepScheduler: DPM-Solver++, called as diffusers' class. Its rows: `samplers/dpm_solver.py`."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from fastdiff.diffusion.configs import DPMSolverConfig
from fastdiff.diffusion.noise import randn_tensor
from fastdiff.diffusion.samplers.dpm_solver import dpm_rows, dpm_schedule, dpm_sigmas, dpm_sigmas_at
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.base import SchedulerOutput
from fastdiff.diffusion.schedulers.sigma import VariancePreservingScheduler, check_chosen
from fastdiff.diffusion.timesteps import checked_steps, custom_timesteps
from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, beside, tensor


class DPMSolverMultistepScheduler(VariancePreservingScheduler):
    """DPM-Solver++ over several steps (Lu et al. 2022), called as diffusers' class. Its options: DPMSolverConfig."""

    config_class = DPMSolverConfig
    multistep = True
    returns_x0 = False
    _options: DPMSolverConfig

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        mu: float | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Choose the steps of a run: their number, or custom timesteps.

        Raises InputError unless one of them is given, where the config's sigmas leave no choice of timesteps, and for
        `mu`, which is of flows.
        """
        if mu is not None:
            raise InputError("mu is of use_dynamic_shifting, which is not here; leave it out")
        check_chosen(self._options, num_inference_steps=num_inference_steps, timesteps=timesteps)
        if timesteps is None:
            steps = checked_steps(self._options, num_inference_steps)
            chosen = dpm_sigmas(self._options, self.alphas_cumprod, steps)
        else:
            own = custom_timesteps(self._options, timesteps).tolist()
            chosen = dpm_sigmas_at(self._options, self.alphas_cumprod, own)
        self._choose(*chosen, device)

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return dpm_schedule(self._options, num_inference_steps)

    def _make_table(self, begin: int) -> Tensor:
        return dpm_rows(self._options, self.sigmas, begin)

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Return x_{t-1} and x0 of x_t and the model output, both (N, C, ...) of any float dtype.

        A learned variance in the output is left aside. `variance_noise` (N, C, ...) replaces the noise that the
        stochastic variant draws. Raises InputError naming a timestep that is not of the run, or a tensor of a wrong
        kind, shape or dtype.
        """
        self._checked_index(timestep, sample, generator, return_dict, model_output)
        if self._options.learns_variance:
            model_output = model_output[:, : sample.shape[1]]
        noise = None
        if self._options.stochastic and variance_noise is not None:
            noise = beside("variance_noise", tensor("variance_noise", variance_noise, FLOATS), sample.device).float()
        elif self._options.stochastic:
            noise = randn_tensor(sample.shape, generator, sample.device, torch.float32)
        return self._take(model_output, sample, noise, return_dict)
