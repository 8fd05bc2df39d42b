"""LMS: a linear multistep method (Adams-Bashforth) over sigmas of any spacing, as diffusers' LMSDiscreteScheduler.

In the variables of Karras et al. 2022 (arXiv 2206.00364) the tangent of a picture is d = (x - x0) / sigma. A step adds
the integral, over the way to the next sigma, of the polynomial through the tangents of the last four steps:

x_next = x + sum of w_k d_k, where w_k is the integral of Lagrange's polynomial of the k-th sigma before this one.
"""

import numpy as np
import torch
from torch import Tensor

from fastdiff.diffusion.configs import LMSConfig
from fastdiff.diffusion.samplers.sigmas import (
    float_sigmas,
    float_timesteps,
    kept_schedule,
    sigma_alpha_bar,
    sigma_x0_columns,
    tangent_columns,
)
from fastdiff.diffusion.schedule import Schedule, stack_sigma_columns
from fastdiff.diffusion.timesteps import checked_steps
from fastdiff.errors import InputError

ORDER = 4
POINTS, SHARES = np.polynomial.legendre.leggauss(2)  # Gauss: two points are exact for a cubic, on [-1, 1]


def lms_rows(config: LMSConfig, sigmas: Tensor, order: int = ORDER) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32, of at most `order`. (steps, len(COLUMNS)) float32.

    A loop that begins later has no earlier outputs: those are zero, as diffusers leaves them out.
    Raises InputError naming a step that cannot be.
    """
    levels = sigmas.double().numpy()
    weights = torch.from_numpy(np.stack([_weights(levels, i, order) for i in range(len(levels) - 1)]))
    sigma = sigmas[:-1].double()
    tangent = tangent_columns(config.prediction_type, sigma)
    columns = sigma_x0_columns(config.prediction_type, sigma) | tangent
    columns |= {"prev_x": 1 + weights[:, 0] * tangent["keep_x"], "prev_m": weights[:, 0] * tangent["keep_m"]}
    columns |= {f"prev_h{k}": weights[:, k] for k in range(1, ORDER)}
    return stack_sigma_columns(columns, sigma)


def _weights(sigmas: np.ndarray, i: int, order: int) -> np.ndarray:
    """Return w of this step's tangent and of those before it, (ORDER,) float64; zero beyond the order."""
    known = sigmas[max(0, i + 1 - order) : i + 1][::-1]
    if len(set(known.tolist())) < len(known):
        raise InputError(f"step {i + 1} of {len(sigmas) - 1} repeats a timestep; use fewer steps")
    half = (sigmas[i + 1] - sigmas[i]) / 2
    points = sigmas[i] + half * (1 + POINTS)
    weights = np.zeros(ORDER)
    for k, own in enumerate(known):
        others = np.delete(known, k)
        weights[k] = half * SHARES @ ((points[:, None] - others) / (own - others)).prod(axis=1)
    return weights


def lms_schedule(config: LMSConfig, num_inference_steps: int) -> Schedule:
    """Return the schedule of a run. Raises InputError naming the option that cannot be used."""
    chosen = float_timesteps(config, checked_steps(config, num_inference_steps))
    timesteps, sigmas = float_sigmas(config, sigma_alpha_bar(config), chosen)
    return kept_schedule(config, timesteps, sigmas, lms_rows(config, sigmas))
