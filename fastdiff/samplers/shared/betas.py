"""The betas of the forward process, and alpha_bar, both bit for bit as in diffusers' schedulers."""

import math

import torch
from torch import Tensor

from fastdiff.samplers.shared.options import DiffusionConfig, ZeroSNRConfig


def make_betas(config: DiffusionConfig) -> Tensor:
    """Return beta_t of the forward process, (num_train_timesteps,) float32, bit for bit as in diffusers."""
    steps, start, end = config.num_train_timesteps, config.beta_start, config.beta_end
    if config.trained_betas is not None:
        betas = torch.tensor(config.trained_betas, dtype=torch.float32)
    elif config.beta_schedule == "linear":
        betas = torch.linspace(start, end, steps, dtype=torch.float32)
    elif config.beta_schedule == "scaled_linear":
        betas = torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float32) ** 2
    elif config.beta_schedule == "sigmoid":
        betas = torch.linspace(-6, 6, steps, dtype=torch.float32).sigmoid() * (end - start) + start
    else:
        alpha_bar = _ALPHA_BARS[config.beta_schedule]
        # at most 0.999, because the cosine's last step would leave no signal
        ratios = (alpha_bar((i + 1) / steps) / alpha_bar(i / steps) for i in range(steps))
        betas = torch.tensor([min(1 - ratio, 0.999) for ratio in ratios], dtype=torch.float32)
    return _rescale_to_zero_snr(betas) if ends_in_noise(config) else betas


def ends_in_noise(config: DiffusionConfig) -> bool:
    """Return whether no signal is left at the last timestep."""
    return isinstance(config, ZeroSNRConfig) and config.rescale_betas_zero_snr


def make_alpha_bar(betas: Tensor) -> Tensor:
    """Return alpha_bar_t, (num_train_timesteps,) float32, bit for bit diffusers' `alphas_cumprod`."""
    return torch.cumprod(1.0 - betas, dim=0)


def _cosine_alpha_bar(time: float) -> float:
    """The cosine schedule of Nichol and Dhariwal 2021, eq. 17."""
    return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2


def _laplace_alpha_bar(time: float) -> float:
    """The Laplace schedule of Hang et al. 2024, table 1, as implemented in diffusers."""
    log_snr = -0.5 * math.copysign(1, 0.5 - time) * math.log(1 - 2 * abs(0.5 - time) + 1e-6)
    snr = math.exp(log_snr)
    return math.sqrt(snr / (1 + snr))


def _exponential_alpha_bar(time: float) -> float:
    return math.exp(time * -12.0)


_ALPHA_BARS = {"squaredcos_cap_v2": _cosine_alpha_bar, "laplace": _laplace_alpha_bar, "exp": _exponential_alpha_bar}


def _rescale_to_zero_snr(betas: Tensor) -> Tensor:
    """Shift and scale sqrt(alpha_bar) so that the last timestep is pure noise (Lin et al. 2024, algorithm 1)."""
    root = make_alpha_bar(betas).sqrt()
    first, last = root[0].clone(), root[-1].clone()
    alpha_bar = ((root - last) * (first / (first - last))) ** 2
    return 1 - torch.cat([alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1]])
