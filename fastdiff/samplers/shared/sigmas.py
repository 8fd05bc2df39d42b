"""The noise levels of a run: sigma = sqrt((1 - alpha_bar) / alpha_bar), spaced as in diffusers' schedulers.

The arithmetic follows diffusers in order and dtype (numpy's float32 and float64), so timesteps match bit for bit.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastdiff.extras import import_scipy_stats
from fastdiff.samplers.shared.betas import ends_in_noise, make_alpha_bar, make_betas
from fastdiff.samplers.shared.options import DiffusionConfig, SigmaConfig
from fastdiff.samplers.shared.timesteps import check_within

RHO = 7.0  # Karras et al. 2022, appendix D.1
BETA = (0.6, 0.6)  # the beta distribution's two parameters, as in diffusers

Array = np.ndarray[Any, Any]


def sigma_alpha_bar(config: DiffusionConfig) -> Tensor:
    """Return alpha_bar, (num_train_timesteps,) float32. Betas rescaled to zero SNR end at 2^-24 instead of 0."""
    alpha_bar = make_alpha_bar(make_betas(config))
    if ends_in_noise(config):
        alpha_bar[-1] = 2**-24
    return alpha_bar


def training_sigmas(alpha_bar: Tensor) -> Tensor:
    """Return sigma at every training timestep, (num_train_timesteps,) float32."""
    return ((1 - alpha_bar) / alpha_bar) ** 0.5


def float_timesteps(config: DiffusionConfig, steps: int) -> Array:
    """Return the timesteps of the Euler family, descending, (steps,) float32. They may be fractions."""
    total = config.num_train_timesteps
    if config.timestep_spacing == "linspace":
        timesteps = np.linspace(0, total - 1, steps, dtype=np.float32)[::-1].copy()
    elif config.timestep_spacing == "leading":
        timesteps = (np.arange(0, steps) * (total // steps)).round()[::-1].astype(np.float32) + config.steps_offset
    else:
        timesteps = np.arange(total, 0, -total / steps).round()[:steps].astype(np.float32) - 1
    return check_within(config, timesteps)


def solver_timesteps(config: DiffusionConfig, steps: int, total: int) -> Array:
    """Return the timesteps of the multistep solvers, descending, (steps,) int64, for `total` training steps.

    For linspace and leading, steps + 1 timesteps are spaced over the training and the last is dropped.
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
    """Return the training `sigmas` interpolated at timesteps, (steps,) float64."""
    return np.interp(timesteps, np.arange(0, len(sigmas)), sigmas)


def timesteps_of(sigmas: Array, log_sigmas: Array) -> Array:
    """Return the timesteps of sigmas, (steps,) float64, by interpolation in the training `log_sigmas`, ascending."""
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
    """Return `steps` sigmas from sigma_max to sigma_min, (steps,) float64.

    sigma_max defaults to the first of `sigmas`, and sigma_min to the last. The spacings are karras (Karras et al. 2022,
    eq. 5), exponential and lu (both evenly spaced in the logarithm, Lu et al. 2022, section 3.3; lu ignores sigma_min
    and sigma_max), and beta (Lee et al. 2024, arXiv 2407.12173). beta needs scipy; InputError if it is not installed.
    """
    last = sigmas[-1].item() if sigma_min is None else sigma_min
    first = sigmas[0].item() if sigma_max is None else sigma_max
    if spacing == "lu":
        start, end = np.log(sigmas[0]).item(), np.log(sigmas[-1]).item()
        return np.exp(start + np.linspace(0, 1, steps) * (end - start))
    if spacing == "karras":
        start, end = first ** (1 / RHO), last ** (1 / RHO)
        return (start + np.linspace(0, 1, steps) * (end - start)) ** RHO
    if spacing == "beta":
        return last + import_scipy_stats("use_beta_sigmas").beta.ppf(1 - np.linspace(0, 1, steps), *BETA) * (
            first - last
        )
    return np.exp(np.linspace(math.log(first), math.log(last), steps))


def time_shifted(times: Any, ratio: float, power: float = 1.0) -> Any:
    """Return times of a flow, from 0 to 1, moved towards the noise by `ratio` (Esser et al. 2024, eq. 23)."""
    return ratio / (ratio + (1 / times - 1) ** power)


def stretched(sigmas: Any, terminal: float) -> Any:
    """Return sigmas (steps,) of a flow stretched away from 1, so that the last one is `terminal`."""
    return 1 - (1 - sigmas) / ((1 - sigmas[-1]) / (1 - terminal))


def with_final(sigmas: Array, alpha_bar: Tensor, final_sigmas_type: str) -> Tensor:
    """Return sigmas with the one after the last step, zero or the smallest training sigma: (steps + 1,) float32."""
    final = training_sigmas(alpha_bar)[0].item() if final_sigmas_type == "sigma_min" else 0.0
    return torch.from_numpy(np.concatenate([sigmas, [final]]).astype(np.float32))


def float_sigmas(config: SigmaConfig, alpha_bar: Tensor, timesteps: Array) -> tuple[Tensor, Tensor]:
    """Return timesteps (steps,) and sigmas (steps + 1,), the last zero, of a run over `timesteps`, both float32."""
    trained = training_sigmas(alpha_bar).numpy()
    sigmas = sigmas_at(timesteps, trained)
    if config.sigma_spacing is not None:
        sigmas = spaced_sigmas(config.sigma_spacing, sigmas, len(timesteps))
        timesteps = timesteps_of(sigmas, np.log(trained))
    return torch.from_numpy(timesteps.astype(np.float32)), with_final(sigmas, alpha_bar, "zero")


def initial_sigma(config: SigmaConfig, sigmas: Tensor) -> Tensor:
    """Return the standard deviation of the starting noise of a run over `sigmas`, a float32 scalar."""
    largest = sigmas.max()
    return largest if config.timestep_spacing in ("linspace", "trailing") else (largest**2 + 1) ** 0.5


def sigma_x0_columns(prediction_type: str, sigmas: Tensor, noised: Tensor | None = None) -> dict[str, Tensor]:
    """Return the columns of x0 for a model that sees x / sqrt(sigma^2 + 1). sigmas is (steps,) float64.

    `noised` gives the sigmas of x itself, if noise was added to it. diffusers ignores them for v_prediction.
    """
    zero, one, square = torch.zeros_like(sigmas), torch.ones_like(sigmas), sigmas**2 + 1
    x0_x, x0_m = {
        "epsilon": (one, -(sigmas if noised is None else noised)),
        "sample": (zero, one),
        "v_prediction": (1 / square, -sigmas / square.sqrt()),
    }[prediction_type]
    return {"x0_x": x0_x, "x0_m": x0_m, "x0_div": one}


def tangent_columns(prediction_type: str, sigmas: Tensor, clips: bool = False) -> dict[str, Tensor]:
    """Return the columns that keep each step's tangent (x - x0) / sigma. sigmas is (steps,) float64.

    The tangent is computed from x and the model's output, because the difference x - x0 cancels at small sigmas. If x0
    is clipped, only the difference is correct.
    """
    zero, one, inverse, square = torch.zeros_like(sigmas), torch.ones_like(sigmas), 1 / sigmas, sigmas**2 + 1
    of_x, of_m = {
        "epsilon": (zero, one),
        "sample": (inverse, -inverse),
        "v_prediction": (sigmas / square, 1 / square.sqrt()),
    }[prediction_type]
    if clips:
        return {"keep_x": inverse, "keep_x0": -inverse, "keep_m": zero}
    return {"keep_x": of_x, "keep_x0": zero, "keep_m": of_m}


def variance_preserving(sigma: float) -> tuple[float, float]:
    """Return the shares of signal and noise, alpha and sigma * alpha, whose squares sum to one."""
    alpha = 1 / math.sqrt(sigma**2 + 1)
    return alpha, sigma * alpha


def vp_x0_columns(prediction_type: str, sigmas: Tensor, flow: bool | None = False) -> dict[str, Tensor]:
    """Return the columns of x0 for x_t = alpha * x_0 + sigma * alpha * eps. sigmas is (steps,) float64.

    With `flow`, x_t = (1 - sigma) * x_0 + sigma * eps. A "flow_prediction" is eps - x_0 in both, as in diffusers.
    """
    signal = 1 - sigmas if flow else 1 / (sigmas**2 + 1).sqrt()
    noise, one, zero = sigmas if flow else sigmas * signal, torch.ones_like(sigmas), torch.zeros_like(sigmas)
    x0_x, x0_m, x0_div = {
        "epsilon": (one, -noise, signal),
        "sample": (zero, one, one),
        "v_prediction": (signal, -noise, one),
        "flow_prediction": (one, -sigmas, one),
    }[prediction_type]
    return {"x0_x": x0_x, "x0_m": x0_m, "x0_div": x0_div}


def eps_columns(x0: dict[str, Tensor], signal: Tensor, noise: Tensor, thresholds: bool) -> dict[str, Tensor]:
    """Return the columns that keep each step's eps = (x - signal * x0) / noise.

    Args:
        x0: The columns of x0, as `vp_x0_columns` returns them.
        signal: The share of the signal at each step, (steps,) float64.
        noise: The share of the noise at each step, (steps,) float64.
        thresholds: Whether x0 is scaled by a quantile. Otherwise eps is computed from x and the model's output, because
            the difference of x and x0 cancels at small noise.
    """
    if thresholds:
        return {"keep_x": 1 / noise, "keep_x0": -signal / noise, "keep_m": torch.zeros_like(noise)}
    share = signal / x0["x0_div"]
    return {
        "keep_x": (1 - share * x0["x0_x"]) / noise,
        "keep_x0": torch.zeros_like(noise),
        "keep_m": -share * x0["x0_m"] / noise,
    }
