"""DDPM: the ancestral sampler of Ho et al. 2020 (arXiv 2006.11239), as diffusers' DDPMScheduler.

x_{t-1} = sqrt(alpha_bar') beta / (1 - alpha_bar) x0 + sqrt(alpha) (1 - alpha_bar') / (1 - alpha_bar) x_t + sigma z

(eq. 7), where alpha_bar' is that of the timestep that the step goes to, alpha = alpha_bar / alpha_bar' and
beta = 1 - alpha. sigma^2 is the posterior's variance, beta (1 - alpha_bar') / (1 - alpha_bar), beta itself
(fixed_large), or what the model says between their logarithms (learned_range).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.diffusion.betas import make_alpha_bar, make_betas
from fastdiff.diffusion.configs import DDPMConfig
from fastdiff.diffusion.samplers.marginals import Marginals, x0_columns
from fastdiff.diffusion.schedule import Schedule, stack_columns, step_options
from fastdiff.diffusion.timesteps import chosen_timesteps, following_in_list
from fastdiff.errors import InputError


def ddpm_schedule(
    config: DDPMConfig, num_inference_steps: int | None = None, *, timesteps: Sequence[int] | None = None
) -> Schedule:
    """Return the schedule of a run over `num_inference_steps`, or over custom `timesteps`.

    Each step goes to the next timestep of the list. Raises InputError naming the option that cannot be used.
    """
    chain = chosen_timesteps(config, num_inference_steps, timesteps)
    rows = ddpm_rows(config, make_alpha_bar(make_betas(config)), chain, following_in_list(chain))
    return Schedule(chain, rows, step_options(config), tuple((chain > 0).tolist()))


def ddpm_rows(config: DDPMConfig, alpha_bar: Tensor, timesteps: Tensor, following: Tensor) -> Tensor:
    """Return a row for each step from `timesteps` to `following`, (steps, len(COLUMNS)) float32.

    `alpha_bar` is that of `make_alpha_bar`; both timesteps are (steps,) int64, a negative one is the picture itself.
    Raises InputError naming the option that leaves a step undefined.
    """
    if config.variance_type == "fixed_large_log":
        raise InputError("variance_type fixed_large_log is the root of a negative number; use fixed_large")
    p = Marginals.between(alpha_bar, timesteps, following, 1.0)
    variance = p.variance.clamp(min=1e-20)  # for its logarithm
    std = {"fixed_small": variance.sqrt(), "fixed_small_log": variance.sqrt(), "fixed_large": p.beta.sqrt()}
    ranged = config.variance_type == "learned_range"
    columns = x0_columns(config.prediction_type, p) | {
        "prev_x0": p.alpha_bar_prev.sqrt() * p.beta / p.beta_bar,
        "prev_x": p.alpha.sqrt() * p.beta_bar_prev / p.beta_bar,
        "sigma": std.get(config.variance_type, torch.ones_like(variance)) * (timesteps > 0),
        "log_variance_min": variance.log() if ranged else torch.zeros_like(variance),
        "log_variance_max": p.beta.clamp(min=1e-20).log() if ranged else torch.zeros_like(variance),
    }
    return stack_columns(columns, config, timesteps, p.alpha_bar)
