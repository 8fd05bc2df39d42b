"""Euler's method, and its ancestral variant, as diffusers' EulerDiscreteScheduler and EulerAncestralDiscreteScheduler.

In the variables of Karras et al. 2022 (arXiv 2206.00364), where x = x_0 + sigma * eps, a step follows the tangent
(x - x0) / sigma to the next sigma (algorithm 1). The ancestral one goes further down, to
sigma_down^2 = sigma_next^2 - sigma_up^2, and adds noise of sigma_up.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastdiff.diffusion.configs import EulerAncestralConfig, EulerConfig, SigmaConfig
from fastdiff.diffusion.samplers.sigmas import (
    float_sigmas,
    float_timesteps,
    initial_sigma,
    sigma_alpha_bar,
    sigma_x0_columns,
    sigmas_at,
    spaced_sigmas,
    timesteps_of,
    training_sigmas,
    with_final,
)
from fastdiff.diffusion.schedule import Schedule, stack_sigma_columns, step_options
from fastdiff.diffusion.timesteps import checked_steps


def euler_sigmas(config: EulerConfig, alpha_bar: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) and sigmas (steps + 1,) of a run, both float32."""
    return _finish(config, alpha_bar, float_timesteps(config, steps))


def euler_sigmas_at(config: EulerConfig, alpha_bar: Tensor, timesteps: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return `euler_sigmas` of a run over custom timesteps."""
    return _finish(config, alpha_bar, np.array(timesteps).astype(np.float32))


def euler_custom_sigmas(config: EulerConfig, alpha_bar: Tensor, sigmas: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return `euler_sigmas` of a run over custom sigmas, the one after the last step among them."""
    log_sigmas = np.log(training_sigmas(alpha_bar).numpy())
    chosen = np.array(sigmas).astype(np.float32)
    return _told(config, torch.from_numpy(chosen), timesteps_of(chosen[:-1], log_sigmas))


def _finish(config: EulerConfig, alpha_bar: Tensor, timesteps: np.ndarray) -> tuple[Tensor, Tensor]:
    trained = training_sigmas(alpha_bar).numpy()
    log_sigmas = np.log(trained)
    if config.interpolation_type == "linear":
        sigmas = sigmas_at(timesteps, trained)
    else:
        sigmas = torch.linspace(log_sigmas[-1], log_sigmas[0], len(timesteps) + 1).exp().numpy()
    if config.sigma_spacing is not None:
        sigmas = spaced_sigmas(config.sigma_spacing, sigmas, len(timesteps), config.sigma_min, config.sigma_max)
        timesteps = timesteps_of(sigmas, log_sigmas)
    return _told(config, with_final(sigmas, alpha_bar, config.final_sigmas_type), timesteps)


def _told(config: EulerConfig, sigmas: Tensor, timesteps: np.ndarray) -> tuple[Tensor, Tensor]:
    if config.tells_log_sigma:
        return torch.tensor([0.25 * sigma.log() for sigma in sigmas[:-1]]), sigmas
    return torch.from_numpy(timesteps.astype(np.float32)), sigmas


def ancestral_sigmas(config: EulerAncestralConfig, alpha_bar: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) and sigmas (steps + 1,) of a run, both float32."""
    return float_sigmas(config, alpha_bar, float_timesteps(config, steps))


def euler_rows(config: EulerConfig, sigmas: Tensor, churn: float = 1.0) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32. (steps, len(COLUMNS)) float32.

    churn  how many times its sigma a step begins at, by noise that was added to its x (algorithm 2).
    """
    sigma, following = sigmas[:-1].double(), sigmas[1:].double()
    start = sigma * churn
    columns = sigma_x0_columns(config.prediction_type, sigma, start)
    columns |= {"prev_x": following / start, "prev_x0": 1 - following / start}
    return stack_sigma_columns(columns, sigma)


def ancestral_rows(config: EulerAncestralConfig, sigmas: Tensor) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32. (steps, len(COLUMNS)) float32."""
    sigma, following = sigmas[:-1].double(), sigmas[1:].double()
    up = (following**2 * (sigma**2 - following**2) / sigma**2).sqrt()
    down = (following**2 - up**2).sqrt()
    columns = sigma_x0_columns(config.prediction_type, sigma)
    columns |= {"prev_x": down / sigma, "prev_x0": 1 - down / sigma, "sigma": up}
    return stack_sigma_columns(columns, sigma)


def euler_schedule(config: EulerConfig, num_inference_steps: int) -> Schedule:
    """Return the schedule of a run. Raises InputError naming the option that cannot be used."""
    timesteps, sigmas = euler_sigmas(config, sigma_alpha_bar(config), checked_steps(config, num_inference_steps))
    return _schedule(config, timesteps, sigmas, euler_rows(config, sigmas), draws=False)


def ancestral_schedule(config: EulerAncestralConfig, num_inference_steps: int) -> Schedule:
    """Return the schedule of a run. Raises InputError naming the option that cannot be used."""
    timesteps, sigmas = ancestral_sigmas(config, sigma_alpha_bar(config), checked_steps(config, num_inference_steps))
    return _schedule(config, timesteps, sigmas, ancestral_rows(config, sigmas), draws=True)


def _schedule(config: SigmaConfig, timesteps: Tensor, sigmas: Tensor, rows: Tensor, draws: bool) -> Schedule:
    return Schedule(
        timesteps,
        rows[: len(timesteps)],
        step_options(config),
        (draws,) * len(timesteps),
        init_noise_sigma=initial_sigma(config, sigmas).item(),
        scales_input=True,
    )
