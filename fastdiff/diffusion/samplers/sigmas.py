"""Noise levels of a run: sigma = sqrt((1 - alpha_bar) / alpha_bar), spaced as diffusers' schedulers space them.

The arithmetic is diffusers', in its order and dtypes (numpy's float32 and float64): the timesteps have its bits.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastdiff.diffusion.betas import make_alpha_bar, make_betas
from fastdiff.diffusion.configs import DiffusionConfig
from fastdiff.diffusion.timesteps import check_within

RHO = 7.0  # Karras et al. 2022, appendix D.1

Array = np.ndarray[Any, Any]


def sigma_alpha_bar(config: DiffusionConfig) -> Tensor:
    """Return `make_alpha_bar`, (num_train_timesteps,) float32; without signal at the end it is 2^-24 there."""
    alpha_bar = make_alpha_bar(make_betas(config))
    if config.rescale_betas_zero_snr:
        alpha_bar[-1] = 2**-24
    return alpha_bar


def training_sigmas(alpha_bar: Tensor) -> Tensor:
    """Return sigma at every timestep of the training, (num_train_timesteps,) float32."""
    return ((1 - alpha_bar) / alpha_bar) ** 0.5


def float_timesteps(config: DiffusionConfig, steps: int) -> Array:
    """Return the timesteps of Euler's family, descending: (steps,) float32, fractions among them."""
    total = config.num_train_timesteps
    if config.timestep_spacing == "linspace":
        timesteps = np.linspace(0, total - 1, steps, dtype=np.float32)[::-1].copy()
    elif config.timestep_spacing == "leading":
        timesteps = (np.arange(0, steps) * (total // steps)).round()[::-1].astype(np.float32) + config.steps_offset
    else:
        timesteps = np.arange(total, 0, -total / steps).round()[:steps].astype(np.float32) - 1
    return check_within(config, timesteps)


def solver_timesteps(config: DiffusionConfig, steps: int, total: int) -> Array:
    """Return the timesteps of the solvers of several steps, descending: (steps,) int64, of `total` of the training.

    They are one more, spaced over all, without the last.
    """
    if config.timestep_spacing == "linspace":
        timesteps = np.linspace(0, total - 1, steps + 1).round()[::-1][:-1].astype(np.int64)
    elif config.timestep_spacing == "leading":
        ratio = total // (steps + 1)
        timesteps = (np.arange(0, steps + 1) * ratio).round()[::-1][:-1].astype(np.int64) + config.steps_offset
    else:
        timesteps = np.arange(total, 0, -config.num_train_timesteps / steps).round().astype(np.int64) - 1
    return check_within(config, timesteps)


def sigmas_at(timesteps: Array, sigmas: Array) -> Array:
    """Return the training's `sigmas` interpolated at timesteps, (steps,) float64."""
    return np.interp(timesteps, np.arange(0, len(sigmas)), sigmas)


def timesteps_of(sigmas: Array, log_sigmas: Array) -> Array:
    """Return the timesteps of sigmas, (steps,) float64, between those of the training's `log_sigmas`, ascending."""
    return np.array([_timestep_of(sigma, log_sigmas) for sigma in sigmas])


def _timestep_of(sigma: Any, log_sigmas: Array) -> Any:
    log_sigma = np.log(np.maximum(sigma, 1e-10))
    low_index = np.cumsum(log_sigma - log_sigmas >= 0).argmax().clip(max=len(log_sigmas) - 2)
    low, high = log_sigmas[low_index], log_sigmas[low_index + 1]
    weight = np.clip((low - log_sigma) / (low - high), 0, 1)
    return (1 - weight) * low_index + weight * (low_index + 1)


def spaced_sigmas(
    spacing: str, sigmas: Array, steps: int, sigma_min: float | None = None, sigma_max: float | None = None
) -> Array:
    """Return `steps` sigmas from sigma_max to sigma_min, (steps,) float64; None is the last or the first of `sigmas`.

    karras: Karras et al. 2022, eq. 5. exponential and lu: evenly in the logarithm (Lu et al. 2022, section 3.3).
    """
    last = sigmas[-1].item() if sigma_min is None else sigma_min
    first = sigmas[0].item() if sigma_max is None else sigma_max
    if spacing == "lu":
        start, end = np.log(sigmas[0]).item(), np.log(sigmas[-1]).item()
        return np.exp(start + np.linspace(0, 1, steps) * (end - start))
    if spacing == "karras":
        start, end = first ** (1 / RHO), last ** (1 / RHO)
        return (start + np.linspace(0, 1, steps) * (end - start)) ** RHO
    return np.exp(np.linspace(math.log(first), math.log(last), steps))


def with_final(sigmas: Array, alpha_bar: Tensor, final_sigmas_type: str) -> Tensor:
    """Return sigmas and the one after the last step: zero, or the training's least. (steps + 1,) float32."""
    final = training_sigmas(alpha_bar)[0].item() if final_sigmas_type == "sigma_min" else 0.0
    return torch.from_numpy(np.concatenate([sigmas, [final]]).astype(np.float32))
