"""DDIM: the sampler of Song et al. 2021 (arXiv 2010.02502), as diffusers' DDIMScheduler.

x_{t-1} = sqrt(alpha_bar') x0 + sqrt(1 - alpha_bar' - sigma^2) eps + sigma z

(eq. 12), where alpha_bar' is that of the timestep that the step goes to and sigma is eta times the deviation of DDPM's
posterior (eq. 16): eta 0 is deterministic, eta 1 has DDPM's variance.
"""

import math

from torch import Tensor

from fastdiff.diffusion.betas import make_alpha_bar, make_betas
from fastdiff.diffusion.configs import DDIMConfig
from fastdiff.diffusion.samplers.marginals import Marginals, x0_columns
from fastdiff.diffusion.schedule import Schedule, stack_columns, step_options
from fastdiff.diffusion.timesteps import following_by_stride, spaced_timesteps
from fastdiff.errors import InputError


def ddim_schedule(
    config: DDIMConfig, num_inference_steps: int, *, eta: float = 0.0, use_clipped_model_output: bool = False
) -> Schedule:
    """Return the schedule of a run: eta 0 is deterministic, eta 1 has DDPM's variance.

    Raises InputError naming the option that cannot be used.
    """
    chain = spaced_timesteps(config, num_inference_steps)
    following = following_by_stride(config, chain, len(chain))
    alpha_bar = make_alpha_bar(make_betas(config))
    rows = ddim_rows(config, alpha_bar, chain, following, eta, use_clipped_model_output)
    return Schedule(chain, rows, step_options(config), (eta > 0,) * len(chain))


def ddim_rows(
    config: DDIMConfig,
    alpha_bar: Tensor,
    timesteps: Tensor,
    following: Tensor,
    eta: float,
    use_clipped_model_output: bool,
) -> Tensor:
    """Return a row for each step from `timesteps` to `following`, (steps, len(COLUMNS)) float32.

    `alpha_bar` is that of `make_alpha_bar`; both timesteps are (steps,) int64, a negative one is the picture itself.
    Raises InputError naming the option that leaves a step undefined.
    """
    if not 0 <= eta < math.inf:
        raise InputError(f"eta is {eta}; it is from 0 (deterministic) to 1 (the variance of DDPM)")
    p = Marginals.between(alpha_bar, timesteps, following, 1.0 if config.set_alpha_to_one else alpha_bar[0].item())
    # in float32 as diffusers, see `Marginals`: where sigma takes all of beta_bar_prev, what is left is roundings
    sigma = eta * p.variance.float() ** 0.5
    squared = p.beta_bar_prev.float() - sigma**2
    if (squared < -1e-6).any():  # more than a rounding
        raise InputError(f"eta is {eta}, more noise than the next timestep has; use eta from 0 to 1")
    direction = squared.clamp(min=0).double().sqrt()  # of eps in x_{t-1}
    columns = x0_columns(config.prediction_type, p) | {"prev_x0": p.alpha_bar_prev.sqrt(), "sigma": sigma.double()}
    if use_clipped_model_output:  # eps = (x_t - signal * x0) / noise, of the clipped x0
        columns["prev_x0"] = columns["prev_x0"] - direction * p.signal / p.noise
        columns["prev_x"] = direction / p.noise
    elif config.prediction_type == "epsilon":
        columns["prev_m"] = direction
    elif config.prediction_type == "sample":  # the same eps, of the x0 before clipping
        columns["prev_x"], columns["prev_m"] = direction / p.noise, -direction * p.signal / p.noise
    else:  # eps = signal * v + noise * x_t
        columns["prev_x"], columns["prev_m"] = direction * p.noise, direction * p.signal
    return stack_columns(columns, config, timesteps, p.alpha_bar)
