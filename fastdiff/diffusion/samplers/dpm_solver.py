"""DPM-Solver++ over several steps (Lu et al. 2022, arXiv 2211.01095), as diffusers' DPMSolverMultistepScheduler.

With alpha = 1 / sqrt(sigma^2 + 1), lambda = -log(sigma) and h = lambda_next - lambda, a step of the first order is

x_next = (sigma_next alpha_next) / (sigma alpha) x + alpha_next (1 - exp(-h)) x0

which is DDIM; the second and the third add the first and second differences of x0 over the steps before (appendix B).
The stochastic variant has exp(-2h) in its place, and adds noise of sigma_next alpha_next sqrt(1 - exp(-2h)).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastdiff.diffusion.configs import DPMSolverConfig
from fastdiff.diffusion.samplers.sigmas import (
    sigma_alpha_bar,
    sigmas_at,
    solver_timesteps,
    spaced_sigmas,
    timesteps_of,
    training_sigmas,
    with_final,
)
from fastdiff.diffusion.schedule import Schedule, stack_sigma_columns, step_options
from fastdiff.diffusion.timesteps import checked_steps
from fastdiff.errors import InputError

FEW_STEPS = 15  # in which lower_order_final lowers the order


def dpm_sigmas(config: DPMSolverConfig, alpha_bar: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) int64 and sigmas (steps + 1,) float32 of a run."""
    log_snr = torch.log(torch.sqrt(alpha_bar)) - torch.log(torch.sqrt(1 - alpha_bar))
    clipped = int(torch.searchsorted(log_snr.flip(0), config.lambda_min_clipped))
    return _finish(config, alpha_bar, solver_timesteps(config, steps, config.num_train_timesteps - clipped), steps)


def dpm_sigmas_at(config: DPMSolverConfig, alpha_bar: Tensor, timesteps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return `dpm_sigmas` of a run over custom timesteps."""
    return _finish(config, alpha_bar, np.array(timesteps).astype(np.int64), len(timesteps))


def _finish(config: DPMSolverConfig, alpha_bar: Tensor, timesteps: np.ndarray, steps: int) -> tuple[Tensor, Tensor]:
    trained = training_sigmas(alpha_bar).numpy()
    spacing = config.sigma_spacing
    if spacing is None:
        sigmas = sigmas_at(timesteps, trained)
    else:
        sigmas = spaced_sigmas(spacing, np.flip(trained), steps)
        timesteps = timesteps_of(sigmas, np.log(trained))
        if spacing in ("karras", "lu") and config.beta_schedule != "squaredcos_cap_v2":
            timesteps = timesteps.round()
    return torch.from_numpy(timesteps.astype(np.int64)), with_final(sigmas, alpha_bar, config.final_sigmas_type)


def variance_preserving(sigma: float) -> tuple[float, float]:
    """Return the shares of signal and noise, alpha and sigma * alpha, where their squares sum to one."""
    alpha = 1 / math.sqrt(sigma**2 + 1)
    return alpha, sigma * alpha


def vp_x0_columns(prediction_type: str, sigmas: Tensor) -> dict[str, Tensor]:
    """Return the columns of x0 of x_t = alpha * x_0 + sigma * alpha * eps; sigmas (steps,) float64."""
    signal = 1 / (sigmas**2 + 1).sqrt()
    noise, one, zero = sigmas * signal, torch.ones_like(sigmas), torch.zeros_like(sigmas)
    x0_x, x0_m, x0_div = {
        "epsilon": (one, -noise, signal),
        "sample": (zero, one, one),
        "v_prediction": (signal, -noise, one),
    }[prediction_type]
    return {"x0_x": x0_x, "x0_m": x0_m, "x0_div": x0_div}


def dpm_rows(config: DPMSolverConfig, sigmas: Tensor, begin: int = 0) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32, for a loop that begins with step `begin`.

    (steps, len(COLUMNS)) float32. Raises InputError naming a step that cannot be.
    """
    levels = sigmas.double().tolist()
    steps = [_step(config, levels, i, _order(config, i, begin, len(levels) - 1)) for i in range(len(levels) - 1)]
    columns = {name: torch.tensor([step.get(name, 0.0) for step in steps], dtype=torch.float64) for name in _COLUMNS}
    sigma = sigmas[:-1].double()
    columns |= vp_x0_columns(config.prediction_type, sigma) | {"keep_x0": torch.ones_like(sigma)}
    return stack_sigma_columns(columns, sigma)


_COLUMNS = ("prev_x", "prev_x0", "prev_h1", "prev_h2", "sigma")


def _order(config: DPMSolverConfig, i: int, begin: int, steps: int) -> int:
    """Return the order of a step: no more than there are outputs, and less at the end of a short run."""
    few = config.lower_order_final and steps < FEW_STEPS
    known = max(1, i - begin + 1)
    if i == steps - 1 and (config.euler_at_final or few or config.final_sigmas_type == "zero"):
        return 1
    return min(config.solver_order, known, 2 if i == steps - 2 and few else 3)


def _step(config: DPMSolverConfig, sigmas: list[float], i: int, order: int) -> dict[str, float]:
    """Return the coefficients of x_next by column."""
    (alpha, noise), (_, noise_now) = variance_preserving(sigmas[i + 1]), variance_preserving(sigmas[i])
    h = math.inf if sigmas[i + 1] == 0 else math.log(sigmas[i] / sigmas[i + 1])
    if h == 0:  # the least sigma twice, or timesteps that are one
        return {"prev_x": 1.0}
    twice = 2 if config.stochastic else 1
    shrunk = -math.expm1(-twice * h)  # 1 - exp(-h), or 1 - exp(-2h)
    prev_x = noise / noise_now * (math.exp(-h) if config.stochastic else 1.0)
    first = alpha * shrunk  # of x0, of its first difference, and of its second
    ratios = [math.log(sigmas[i - k - 1] / sigmas[i - k]) / h for k in range(order - 1)]
    if any(ratio == 0 for ratio in ratios):
        raise InputError(f"step {i + 1} of {len(sigmas) - 1} repeats a timestep; use fewer steps")
    weights = [first]
    if order == 2:
        weights.append(first / 2 if config.solver_type == "midpoint" else alpha * (1 - shrunk / (twice * h)))
    if order == 3:
        weights.append(alpha * (1 - shrunk / (twice * h)))
        half = -0.5 if config.stochastic else 0.5  # diffusers' sign
        weights.append(alpha * ((shrunk - twice * h) / (twice * h) ** 2 + half))
    return {"prev_x": prev_x, "sigma": noise * math.sqrt(shrunk) if config.stochastic else 0.0} | _by_output(
        weights, ratios
    )


def _by_output(weights: list[float], ratios: list[float]) -> dict[str, float]:
    """Return what each x0 is multiplied by, of the weights of x0 and its differences D1 and D2 (appendix B).

    ratios  the steps before this one in lambda, the latest first, as shares of h
    """
    if len(weights) == 1:
        return {"prev_x0": weights[0]}
    if len(weights) == 2:
        slope = weights[1] / ratios[0]
        return {"prev_x0": weights[0] + slope, "prev_h1": -slope}
    r0, r1 = ratios
    # D1 = D10 + r0 / (r0 + r1) (D10 - D11) and D2 = (D10 - D11) / (r0 + r1) of the slopes D10 and D11
    curve = (weights[1] * r0 + weights[2]) / (r0 + r1)
    latest, earlier = (weights[1] + curve) / r0, -curve / r1
    return {"prev_x0": weights[0] + latest, "prev_h1": earlier - latest, "prev_h2": -earlier}


def dpm_schedule(config: DPMSolverConfig, num_inference_steps: int) -> Schedule:
    """Return the schedule of a run. Raises InputError naming the option that cannot be used."""
    timesteps, sigmas = dpm_sigmas(config, sigma_alpha_bar(config), checked_steps(config, num_inference_steps))
    steps = len(timesteps)
    return Schedule(
        timesteps,
        dpm_rows(config, sigmas),
        step_options(config),
        (config.stochastic,) * steps,
        keeps_output=(True,) * steps,
        noise_dtype=torch.float32,
    )
