"""Shared by the samplers' rows: the forward process at both ends of each step, and x0 from a model's output."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Marginals:
    """The forward process at both ends of each step. Each tensor is (steps,) float64.

    x_t = signal * x_0 + noise * eps (Ho et al. 2020, eq. 4).
    """

    alpha_bar: Tensor  # the signal's share of the variance at timestep t
    alpha_bar_prev: Tensor  # the same at the step's target timestep
    beta_bar: Tensor  # 1 - alpha_bar
    beta_bar_prev: Tensor
    alpha: Tensor  # alpha_bar / alpha_bar_prev
    beta: Tensor  # 1 - alpha
    signal: Tensor  # sqrt(alpha_bar)
    noise: Tensor  # sqrt(beta_bar)
    variance: Tensor  # of the posterior q(x_{t-1} | x_t, x_0)

    @classmethod
    def between(cls, alphas_cumprod: Tensor, timesteps: Tensor, following: Tensor, final: float) -> "Marginals":
        """Return the marginals of the steps from `timesteps` to `following`, both (steps,) int64.

        Args:
            alphas_cumprod: (num_train_timesteps,) float32, from `betas.make_alpha_bar`.
            timesteps: Where each step begins.
            following: Where each step ends.
            final: The alpha_bar of a negative timestep, which stands for the clean picture.
        """
        # Rounded to float32 as in diffusers, because cancellation amplifies any difference. At small timesteps, beta
        # and beta_bar are the float32 result of 1 - 0.9999; exact values change a step by up to 5e-4. At large
        # timesteps, x0 is (x_t - noise * eps) / signal, which multiplies one ulp of noise by 160, to 4e-5 of a clipped
        # x0.
        alpha_bar = alphas_cumprod[timesteps]
        alpha_bar_prev = torch.where(following >= 0, alphas_cumprod[following.clamp(min=0)], final)
        beta_bar, beta_bar_prev, alpha = 1 - alpha_bar, 1 - alpha_bar_prev, alpha_bar / alpha_bar_prev
        beta = 1 - alpha
        roots_and_variance = alpha_bar**0.5, beta_bar**0.5, beta_bar_prev / beta_bar * beta
        rounded = alpha_bar, alpha_bar_prev, beta_bar, beta_bar_prev, alpha, beta, *roots_and_variance
        return cls(*(value.double() for value in rounded))


def x0_columns(prediction_type: str, p: Marginals) -> dict[str, Tensor]:
    """Return the columns of x0 = (x0_x * x_t + x0_m * m) / x0_div for a model's output m.

    epsilon and sample: Ho et al. 2020, eq. 4. v_prediction: Salimans and Ho 2022, section 4. The step divides by
    x0_div, as diffusers does, because multiplying by the reciprocal gives different bits.
    """
    zero, one = torch.zeros_like(p.alpha_bar), torch.ones_like(p.alpha_bar)
    x0_x, x0_m, x0_div = {
        "epsilon": (one, -p.noise, p.signal),
        "sample": (zero, one, one),
        "v_prediction": (p.signal, -p.noise, one),
    }[prediction_type]
    return {"x0_x": x0_x, "x0_m": x0_m, "x0_div": x0_div}
