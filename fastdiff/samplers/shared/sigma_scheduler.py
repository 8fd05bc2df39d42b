"""SigmaScheduler, the base of samplers whose steps go from one noise level sigma to the next."""

from typing import Any

import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, REAL, beside, tensor
from fastdiff.samplers.shared.counted import CountedScheduler
from fastdiff.samplers.shared.options import FlowConfig, SigmaConfig, SpacedSigmaConfig
from fastdiff.samplers.shared.sigmas import (
    float_sigmas,
    float_timesteps,
    initial_sigma,
    sigma_alpha_bar,
    training_sigmas,
)
from fastdiff.samplers.shared.timesteps import checked_steps


class SigmaScheduler(CountedScheduler):
    """A sampler whose step i goes from sigmas[i] to sigmas[i + 1]."""

    _options: SigmaConfig

    def _make_process(self) -> None:
        super()._make_process()
        self.alphas_cumprod = sigma_alpha_bar(self._options)
        self.sigmas = training_sigmas(self.alphas_cumprod)

    def _choose(self, timesteps: Tensor, sigmas: Tensor, device: torch.device | str | None) -> None:
        """Start a new run over timesteps (steps,) and sigmas (steps + 1,)."""
        self._begin_run(timesteps, device)
        self.sigmas = sigmas

    def scale_model_input(self, sample: Tensor, timestep: float | Tensor | None = None) -> Tensor:
        """Return the model's input at the next step: sample / sqrt(sigma^2 + 1).

        Schedulers that do not scale the input return the sample unchanged.
        """
        tensor("sample", sample, FLOATS)
        if not self.scales_input:
            return sample
        if timestep is None:
            raise InputError("timestep is None; give the timestep that the model gets")
        return sample / (self._input_sigma(self._index(timestep)) ** 2 + 1) ** 0.5

    def _input_sigma(self, index: int) -> Tensor:
        """Return the sigma at which the model is called, a float32 scalar."""
        return self.sigmas[index]

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return `x_t` = x0 + sigma * noise, at timesteps (N,) of the run. Samples are (N, ...)."""
        return self._mix(original_samples, noise, self._sigmas_of(original_samples, noise, timesteps))

    def _mix(self, samples: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Return x_t at sigma, which broadcasts with the samples."""
        return samples + noise * sigma

    def _shares_of_run(self) -> Tensor:
        sigma = self.sigmas[: len(self.timesteps)].cpu()
        one, zero = torch.ones_like(sigma), torch.zeros_like(sigma)
        return torch.stack([self._mix(one, zero, sigma), self._mix(zero, one, sigma)], dim=1)

    def _sigmas_of(self, samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the sigma of each sample (N, 1, ...): the current step's if `begin_index` is set, else by timestep."""
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
        """Raise InputError.

        In diffusers only Euler has this method among these schedulers, and it reads timesteps as indices.
        """
        raise InputError(f"{type(self).__name__} has no get_velocity; use DDPMScheduler's or DDIMScheduler's")


class ScaledScheduler(SigmaScheduler):
    """A sampler in the variables of Karras et al. 2022, where x = x_0 + sigma * eps."""

    scales_input = True

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Set the number of steps of a run, and make `timesteps` on `device`.

        Raises InputError unless the number is from 1 to the number of training timesteps, and if `steps_offset` moves a
        timestep outside them.
        """
        timesteps = float_timesteps(self._options, checked_steps(self._options, num_inference_steps))
        self._choose(*float_sigmas(self._options, self.alphas_cumprod, timesteps), device)

    @property
    def init_noise_sigma(self) -> Tensor:  # type: ignore[override]  # a float in other schedulers
        """The standard deviation of the starting noise, a float32 scalar as in diffusers."""
        return initial_sigma(self._options, self.sigmas)


class VariancePreservingScheduler(SigmaScheduler):
    """A sampler whose x_t is alpha * x_0 + sigma * alpha * eps, with alpha = 1 / sqrt(sigma^2 + 1).

    With use_flow_sigmas, x_t is (1 - sigma) * x_0 + sigma * eps.
    """

    _options: FlowConfig

    def _mix(self, samples: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        if self._options.use_flow_sigmas:
            return (1 - sigma) * samples + sigma * noise
        alpha = 1 / (sigma**2 + 1) ** 0.5
        return alpha * samples + sigma * alpha * noise


def check_chosen(options: SpacedSigmaConfig, **choices: Any) -> None:
    """Raise InputError unless exactly one choice of steps is given, and it is compatible with the config's sigmas."""
    if sum(choice is not None for choice in choices.values()) != 1:
        *names, last = choices
        raise InputError(f"give one of {', '.join(names)} and {last}")
    if choices.get("timesteps") is not None and options.sigma_spacing is not None:
        raise InputError("timesteps: this scheduler's options allow no custom ones; give num_inference_steps")
