"""Heun's method of the second order (Karras et al. 2022, arXiv 2206.00364, algorithm 1), as diffusers' class.

A step makes two calls. The first goes along the tangent d = (x - x0) / sigma to the next sigma. The second takes the
tangent d' there, and the step again, along the mean of both. The step to sigma zero is the first call alone.
"""

import numpy as np
import torch
from torch import Tensor

from fastdiff.diffusion.configs import HeunConfig
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


def heun_sigmas(config: HeunConfig, alpha_bar: Tensor, timesteps: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the timesteps (2 * steps - 1,) and sigmas (2 * steps,) of a run's calls over `timesteps`, both float32.

    A call is made at its sigma, and all but the first and the last come twice: as a step's end, and as the next one's
    start.
    """
    of_steps, sigmas = float_sigmas(config, alpha_bar, timesteps)
    calls = torch.cat([of_steps[:1], of_steps[1:].repeat_interleave(2)])
    return calls, torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])


def heun_rows(config: HeunConfig, sigmas: Tensor, begin: int = 0) -> Tensor:
    """Return a row for each call over sigmas (calls + 1,) float32, of a loop that begins with call `begin`.

    (calls, len(COLUMNS)) float32. Raises InputError naming a call that cannot be.
    """
    sigma, following = sigmas[:-1].double(), sigmas[1:].double()
    before = sigma.roll(1)  # where the step of a second call began; a run's first call is none
    again = (torch.arange(len(sigma)) - begin) % 2 == 1
    way = torch.where(again, (sigma - before) / 2, following - sigma)  # along this call's tangent
    tangent = tangent_columns(config.prediction_type, sigma, config.clip_sample)
    columns = sigma_x0_columns(config.prediction_type, sigma) | tangent
    columns |= {
        "prev_x": (~again).double() + way * tangent["keep_x"],
        "prev_x0": way * tangent["keep_x0"],
        "prev_m": way * tangent["keep_m"],
        "prev_y": again.double(),
        "prev_h1": way * again,
        "y_x": (~again).double(),
        "y_s": again.double(),
    }
    return stack_sigma_columns(columns, sigma)


def heun_schedule(config: HeunConfig, num_inference_steps: int) -> Schedule:
    """Return the schedule of a run, a row a call. Raises InputError naming the option that cannot be used."""
    chosen = float_timesteps(config, checked_steps(config, num_inference_steps))
    timesteps, sigmas = heun_sigmas(config, sigma_alpha_bar(config), chosen)
    return kept_schedule(config, timesteps, sigmas, heun_rows(config, sigmas))
