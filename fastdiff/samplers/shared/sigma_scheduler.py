"""SigmaScheduler, the base of samplers whose steps go from one noise level sigma to the next."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, REAL, beside, tensor
from fastdiff.samplers.shared.counted import CountedScheduler
from fastdiff.samplers.shared.options import SigmaConfig, SpacedSigmaConfig
from fastdiff.samplers.shared.sigmas import (
    float_sigmas,
    float_timesteps,
    initial_sigma,
    sigma_alpha_bar,
    training_sigmas,
)
from fastdiff.samplers.shared.timesteps import checked_steps
from fastdiff.schema import checked


class SigmaScheduler(CountedScheduler):
    """A sampler whose step i goes from sigmas[i] to sigmas[i + 1]."""

    _options: SigmaConfig

    def _build(self, mapping: Mapping[str, Any]) -> None:
        super()._build(mapping)
        self.alphas_cumprod = sigma_alpha_bar(self._options)
        self.sigmas = training_sigmas(self.alphas_cumprod)

    def _choose(self, timesteps: Tensor, sigmas: Tensor, device: torch.device | str | None) -> None:
        """Take over the timesteps (steps,) and sigmas of a run."""
        self._begin_run(timesteps, device)
        self.sigmas = sigmas

    def scale_model_input(self, sample: Tensor, timestep: float | Tensor | None = None) -> Tensor:
        """Return what the model is given for a sample of the next step: sample / sqrt(sigma^2 + 1), or as it is."""
        tensor("sample", sample, FLOATS)
        if not self.scales_input:
            return sample
        if timestep is None:
            raise InputError("timestep is None; give the one that the model is told")
        return sample / (self.sigmas[self._index(timestep)] ** 2 + 1) ** 0.5

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return x_t of x0 and noise, at timesteps (N,) of the run: x0 + sigma * noise. Samples (N, ...)."""
        sigma = self._sigmas_of(original_samples, noise, timesteps)
        return original_samples + noise * sigma

    def _sigmas_of(self, samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the sigma of each sample (N, 1, ...): at the begin of a loop, in it, or as its timestep says."""
        tensor("original_samples", samples, FLOATS)
        beside("noise", tensor("noise", noise, FLOATS), samples.device)
        times = torch.atleast_1d(tensor("timesteps", timesteps, REAL))
        if self._begin_index is None:
            indices = [self.index_for_timestep(t) for t in times]
        else:
            indices = [self._begin_index if self._step_index is None else self._step_index] * len(times)
        sigma = self.sigmas[indices].to(samples.device, samples.dtype)
        return sigma.reshape(-1, *[1] * (samples.ndim - 1))

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Raises InputError: of these schedulers only Euler has it in diffusers, and takes places for timesteps."""
        raise InputError(f"{type(self).__name__} has no get_velocity; use DDPMScheduler's or DDIMScheduler's")


class ScaledScheduler(SigmaScheduler):
    """A sampler in the variables of Karras et al. 2022, where x = x_0 + sigma * eps."""

    scales_input = True

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the number of steps of a run. Raises InputError for one that the training does not have."""
        timesteps = float_timesteps(self._options, checked_steps(self._options, num_inference_steps))
        self._choose(*float_sigmas(self._options, self.alphas_cumprod, timesteps), device)

    @property
    def init_noise_sigma(self) -> Tensor:  # type: ignore[override]  # a number in the others
        """The deviation of the noise that a run starts from, a float32 scalar as in diffusers."""
        return initial_sigma(self._options, self.sigmas)


class VariancePreservingScheduler(SigmaScheduler):
    """A sampler whose x_t is alpha * x_0 + sigma * alpha * eps, with alpha = 1 / sqrt(sigma^2 + 1)."""

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return x_t of x0 and noise, at timesteps (N,) of the run. Samples (N, ...)."""
        sigma = self._sigmas_of(original_samples, noise, timesteps)
        alpha = 1 / (sigma**2 + 1) ** 0.5
        return alpha * original_samples + sigma * alpha * noise


def check_chosen(options: SpacedSigmaConfig, **choices: Any) -> None:
    """Raise InputError unless one way to choose a run's steps is given, that leaves the config's sigmas a say."""
    if sum(choice is not None for choice in choices.values()) != 1:
        *names, last = choices
        raise InputError(f"give one of {', '.join(names)} and {last}")
    if choices.get("timesteps") is not None and options.sigma_spacing is not None:
        raise InputError("timesteps: this scheduler's sigmas are not the timesteps'; give num_inference_steps")


def numbers(name: str, values: Sequence[float], least: int = 1) -> tuple[float, ...]:
    """Return `values` of an argument, at least so many. Raises InputError for others."""
    given = checked(name, values, tuple[float, ...])
    if len(given) < least:
        raise InputError(f"{name}: {len(given)} given; give at least {least}")
    return given
