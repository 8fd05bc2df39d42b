"""Flow matching (Lipman et al. 2022, arXiv 2210.02747) in the multistep solvers, by `use_flow_sigmas`.

A flow mixes x_t = (1 - sigma) x_0 + sigma eps. The other noise levels mix x_t = alpha x_0 + sigma alpha eps with
alpha = 1 / sqrt(sigma^2 + 1). The solvers' formulas read only the two shares and their ratio noise / signal, so the
same rows serve both.
"""

import math
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.samplers.shared.options import FlowConfig
from fastdiff.samplers.shared.schedule import undefined_sigma_step
from fastdiff.samplers.shared.sigmas import (
    Array,
    sigmas_at,
    spaced_sigmas,
    timesteps_of,
    training_sigmas,
    variance_preserving,
)
from fastdiff.schema import checked

Mu = Annotated[float, Interval(ge=-20, le=20)]


def shifted(sigmas: Array, shift: float) -> Array:
    """Return the sigmas of a flow moved towards the noise by `shift` (Esser et al. 2024, arXiv 2403.03206, eq. 23)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def run_shift(config: FlowConfig, mu: Any) -> float:
    """Return the shift of a run: exp(mu), or flow_shift without `mu`.

    Raises InputError for a `mu` that is not a number from -20 to 20, and for one without use_dynamic_shifting.
    """
    if mu is None:
        return config.flow_shift
    if not config.use_dynamic_shifting:
        raise InputError("mu is only read with use_dynamic_shifting; leave it out, or set use_dynamic_shifting")
    return math.exp(checked("mu", mu, Mu))


def solver_sigmas(
    config: FlowConfig, alpha_bar: Tensor, timesteps: Array, shift: float, rounded: tuple[str, ...]
) -> tuple[Tensor, Array]:
    """Return the timesteps (steps,) int64 of a run and its sigmas before the last one, (steps,) float64.

    Without a spacing, the sigmas belong to `timesteps` (steps,). A spacing chooses others, and a flow shifts them by
    `shift`. The timesteps of the spacings in `rounded` are rounded to the nearest, all others down, as in diffusers.
    """
    trained, spacing = training_sigmas(alpha_bar).numpy(), config.sigma_spacing
    if spacing is None:
        return torch.from_numpy(timesteps), sigmas_at(timesteps, trained)
    if spacing == "flow":
        levels = 1.0 - np.linspace(1, 1 / config.num_train_timesteps, len(timesteps) + 1)
        sigmas = np.flip(shifted(levels, shift))[:-1].copy()
        times = sigmas * config.num_train_timesteps
    else:
        sigmas = spaced_sigmas(spacing, np.flip(trained), len(timesteps))
        times = timesteps_of(sigmas, np.log(trained))
        times = times.round() if spacing in rounded else times
    return torch.from_numpy(times.astype(np.int64)), sigmas


def noise_ratios(config: FlowConfig, sigmas: Tensor) -> list[float]:
    """Return noise / signal at each of sigmas (steps + 1,), in float64.

    Raises InputError that names a step that begins without noise or without signal.
    """
    levels = sigmas.double()
    ratios = levels / (1 - levels) if config.use_flow_sigmas else levels
    defined = ratios.isfinite() & (ratios > 0)
    if not defined[:-1].all():
        raise undefined_sigma_step(int((~defined[:-1]).nonzero()[0]), levels[:-1])
    return ratios.tolist()


def signal_and_noise(config: FlowConfig, ratio: float) -> tuple[float, float]:
    """Return the shares of signal and noise for their `ratio` noise / signal."""
    return (1 / (1 + ratio), ratio / (1 + ratio)) if config.use_flow_sigmas else variance_preserving(ratio)
