"""Flow matching (Lipman et al. 2022, arXiv 2210.02747) in the multistep solvers, by `use_flow_sigmas`.

A flow mixes x_t = (1 - sigma) x_0 + sigma eps. The other noise levels mix x_t = alpha x_0 + sigma alpha eps with
alpha = 1 / sqrt(sigma^2 + 1). The solvers' formulas read only the two shares and their ratio noise / signal, so the
same rows serve both.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.samplers.shared.options import FlowConfig
from fastdiff.samplers.shared.schedule import stack_sigma_columns, undefined_sigma_step
from fastdiff.samplers.shared.sigmas import (
    Array,
    eps_columns,
    sigmas_at,
    spaced_sigmas,
    timesteps_of,
    training_sigmas,
    variance_preserving,
    vp_x0_columns,
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


def solver_rows(
    config: FlowConfig, sigmas: Tensor, steps: Sequence[Mapping[str, float]], keeps_eps: bool = False
) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32. (steps, len(COLUMNS)) float32.

    Args:
        config: The solver's options.
        sigmas: The noise levels, the one after the last step included.
        steps: The coefficients of each step by column; "output" is the coefficient of the step's own output.
        keeps_eps: Whether a step's output is eps instead of x0.

    Raises InputError that names a step without a solution.
    """
    sigma = sigmas[:-1].double()
    zero, one = torch.zeros_like(sigma), torch.ones_like(sigma)
    x0 = vp_x0_columns(config.prediction_type, sigma, config.use_flow_sigmas)
    kept = {"keep_x": zero, "keep_x0": one, "keep_m": zero}
    if keeps_eps:
        shares = [signal_and_noise(config, ratio) for ratio in noise_ratios(config, sigmas)[:-1]]
        signal, noise = torch.tensor(shares, dtype=torch.float64).unbind(dim=1)
        noise = sigma if config.prediction_type == "flow_prediction" else noise  # also without a flow, as in diffusers
        kept = eps_columns(x0, signal, noise, config.thresholding)
    names = {"output", "prev_x", *(name for step in steps for name in step)}
    columns = {name: torch.tensor([step.get(name, 0.0) for step in steps], dtype=torch.float64) for name in names}
    output = columns.pop("output")
    columns["prev_x"] += output * kept["keep_x"]
    columns |= {"prev_x0": output * kept["keep_x0"], "prev_m": output * kept["keep_m"]}
    return stack_sigma_columns(columns | x0 | kept, sigma)
