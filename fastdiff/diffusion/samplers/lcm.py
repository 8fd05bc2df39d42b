"""LCM: steps of a latent consistency model (Luo et al. 2023, arXiv 2310.04378), as diffusers' LCMScheduler.

Each call says the picture itself: f = c_skip x_t + c_out x0, with c_skip = s^2 / (u^2 + s^2) and
c_out = u / sqrt(u^2 + s^2) of the scaled timestep u, so that f is x_t at timestep 0 (eq. 9; Song et al. 2023,
appendix C). All steps but the last go on from f with fresh noise (algorithm 3):

x_next = sqrt(alpha_bar') f + sqrt(1 - alpha_bar') z
"""

import numpy as np
import torch
from torch import Tensor

from fastdiff.diffusion.betas import make_alpha_bar, make_betas
from fastdiff.diffusion.configs import LCMConfig
from fastdiff.diffusion.samplers.marginals import Marginals, x0_columns
from fastdiff.diffusion.schedule import Schedule, stack_columns, step_options
from fastdiff.diffusion.timesteps import checked_steps
from fastdiff.errors import InputError

SIGMA_DATA = 0.5  # s


def lcm_timesteps(config: LCMConfig, steps: int, original_steps: int | None = None, strength: float = 1.0) -> Tensor:
    """Return a run's timesteps, descending, of those that the model was distilled at: (steps,) int64.

    original_steps  how many those are; None is the config's original_inference_steps
    strength        the share of them that the run is taken from, beginning with the least

    Raises InputError for more steps than there are, and more original steps than the training has.
    """
    total = config.num_train_timesteps
    original = config.original_inference_steps if original_steps is None else original_steps
    if original > total:
        raise InputError(f"original_inference_steps is {original}; it is at most the {total} steps of the training")
    distilled = np.arange(1, int(original * strength) + 1) * (total // original) - 1
    if steps > len(distilled):
        raise InputError(
            f"num_inference_steps is {steps}; of {original} original_inference_steps at strength {strength:g} there are"
            f" {len(distilled)}: use fewer steps"
        )
    places = np.floor(np.linspace(0, len(distilled), num=steps, endpoint=False)).astype(np.int64)
    return torch.from_numpy(distilled[::-1][places].astype(np.int64))


def boundary_scalings(config: LCMConfig, timesteps: Tensor) -> tuple[Tensor, Tensor]:
    """Return c_skip and c_out at timesteps (steps,), both (steps,) float64."""
    scaled = timesteps.double() * config.timestep_scaling
    square = scaled**2 + SIGMA_DATA**2
    return SIGMA_DATA**2 / square, scaled / square.sqrt()


def lcm_rows(config: LCMConfig, alpha_bar: Tensor, timesteps: Tensor, last: int) -> Tensor:
    """Return a row for each step over timesteps (steps,) int64, of which step `last` adds no noise.

    (steps, len(COLUMNS)) float32. Raises InputError naming the option that leaves a step undefined.
    """
    following = torch.cat([timesteps[1:], timesteps[-1:]])
    p = Marginals.between(alpha_bar, timesteps, following, 1.0)
    c_skip, c_out = boundary_scalings(config, timesteps)
    ends = torch.arange(len(timesteps)) == last
    signal = torch.where(ends, 1.0, p.alpha_bar_prev.sqrt())
    columns = x0_columns(config.prediction_type, p) | {
        "prev_x0": signal * c_out,
        "prev_x": signal * c_skip,
        "sigma": torch.where(ends, 0.0, p.beta_bar_prev.sqrt()),
    }
    return stack_columns(columns, config, timesteps, p.alpha_bar)


def lcm_schedule(config: LCMConfig, num_inference_steps: int) -> Schedule:
    """Return the schedule of a run. Raises InputError naming the option that cannot be used."""
    steps = checked_steps(config, num_inference_steps)
    timesteps = lcm_timesteps(config, steps)
    rows = lcm_rows(config, make_alpha_bar(make_betas(config)), timesteps, steps - 1)
    return Schedule(timesteps, rows, step_options(config), (*(True,) * (steps - 1), False))
