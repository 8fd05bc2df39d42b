"""Euler's method and its ancestral variant, called as diffusers' classes. Their rows: `samplers/euler.py`."""

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from fastdiff.diffusion.configs import EulerAncestralConfig, EulerConfig
from fastdiff.diffusion.noise import randn_tensor
from fastdiff.diffusion.samplers.euler import (
    ancestral_rows,
    ancestral_schedule,
    ancestral_sigmas,
    euler_custom_sigmas,
    euler_rows,
    euler_schedule,
    euler_sigmas,
    euler_sigmas_at,
)
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.base import SchedulerOutput
from fastdiff.diffusion.schedulers.sigma import ScaledScheduler, check_chosen, numbers
from fastdiff.diffusion.timesteps import checked_steps
from fastdiff.errors import InputError
from fastdiff.kinds import NotNegative
from fastdiff.schema import checked


class EulerDiscreteScheduler(ScaledScheduler):
    """Euler's method (Karras et al. 2022), called as diffusers' EulerDiscreteScheduler. Its options: EulerConfig."""

    config_class = EulerConfig
    _options: EulerConfig

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        timesteps: Sequence[float] | None = None,
        sigmas: Sequence[float] | None = None,
    ) -> None:
        """Choose the steps of a run: their number, custom timesteps, or custom sigmas with the one after the last step.

        Raises InputError unless one of them is given, and where the config's sigmas leave no choice of timesteps.
        """
        check_chosen(self._options, num_inference_steps=num_inference_steps, timesteps=timesteps, sigmas=sigmas)
        if timesteps is not None:
            if self._options.tells_log_sigma:
                raise InputError("timesteps: this scheduler's sigmas are not the timesteps'; give num_inference_steps")
            chosen = euler_sigmas_at(self._options, self.alphas_cumprod, numbers("timesteps", timesteps))
        elif sigmas is not None:
            chosen = euler_custom_sigmas(self._options, self.alphas_cumprod, numbers("sigmas", sigmas, least=2))
        else:
            chosen = euler_sigmas(self._options, self.alphas_cumprod, checked_steps(self._options, num_inference_steps))
        self._choose(*chosen, device)

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return euler_schedule(self._options, num_inference_steps)

    def _make_table(self, begin: int) -> Tensor:
        return euler_rows(self._options, self.sigmas)

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = math.inf,
        s_noise: float = 1.0,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Return x_{t-1} and x0 of x_t and the model output, both (N, C, ...) of any float dtype.

        `s_churn` and what follows add noise first (Karras et al. 2022, algorithm 2). Raises InputError naming a
        timestep that is not of the run, or a tensor of a wrong kind, shape or dtype.
        """
        index = self._checked_index(timestep, sample, generator, return_dict, model_output)
        s_churn, s_tmin, s_noise = (
            checked(name, value, NotNegative)
            for name, value in {"s_churn": s_churn, "s_tmin": s_tmin, "s_noise": s_noise}.items()
        )
        sigma = self.sigmas[index].item()
        gamma = min(s_churn / (len(self.sigmas) - 1), 2**0.5 - 1) if s_tmin <= sigma <= s_tmax else 0.0
        if gamma == 0:
            return self._take(model_output, sample, None, return_dict)
        noise = randn_tensor(model_output.shape, generator, sample.device, model_output.dtype) * s_noise
        noised = sample.float() + noise * sigma * ((gamma + 1) ** 2 - 1) ** 0.5
        row = euler_rows(self._options, self.sigmas, gamma + 1)[index].to(sample.device)
        return self._take(model_output, noised, None, return_dict, row)


class EulerAncestralDiscreteScheduler(ScaledScheduler):
    """Ancestral steps of Euler's method, called as diffusers' class of this name. Its options: EulerAncestralConfig."""

    config_class = EulerAncestralConfig
    _options: EulerAncestralConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the number of steps of a run. Raises InputError for one that the training does not have."""
        steps = checked_steps(self._options, num_inference_steps)
        self._choose(*ancestral_sigmas(self._options, self.alphas_cumprod, steps), device)

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return ancestral_schedule(self._options, num_inference_steps)

    def _make_table(self, begin: int) -> Tensor:
        return ancestral_rows(self._options, self.sigmas)

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Return x_{t-1} and x0 of x_t and the model output, both (N, C, ...) of any float dtype.

        Raises InputError naming a timestep that is not of the run, or a tensor of a wrong kind, shape or dtype.
        """
        self._checked_index(timestep, sample, generator, return_dict, model_output)
        noise = randn_tensor(model_output.shape, generator, sample.device, model_output.dtype)
        return self._take(model_output, sample, noise, return_dict)
