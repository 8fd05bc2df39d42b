"""Schedule: the steps of a run as data. A sampler computes the rows, and one step function runs all samplers.

A row holds the coefficients of a step. `fastdiff.kernels.device.denoise_columns` names them and explains their use.
Rows are computed in float64 and stored in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.execution.transfers import upload
from fastdiff.kernels.denoise import COLUMNS, StepOptions
from fastdiff.samplers.shared.options import ClippingConfig, DiffusionConfig, SchedulerConfig, ThresholdingConfig

# Returns the index of the model call that a run begins with, from the timesteps of all calls (calls,), the number of
# steps, and the calls of a step. Raises InputError if no call is left.
Begin = Callable[[Tensor, int, int], int]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of a run, computed once.

    Each step calls the model once. A sampler that needs a new term adds a column: it adds the name to COLUMNS, the use
    to `denoise_step`, and the values to its own rows. All other samplers have zero there.
    """

    timesteps: Tensor  # (steps,) int64 or float32, on the CPU: what the model gets
    rows: Tensor  # (steps, len(COLUMNS)) float32
    options: StepOptions
    draws_noise: tuple[bool, ...]  # per step, whether it adds noise
    init_noise_sigma: float = 1.0  # the standard deviation of the starting noise
    scales_input: bool = False  # whether the model sees x_t divided by input_div
    multistep: bool = False  # whether steps read what earlier steps kept
    noise_dtype: torch.dtype | None = None  # in which a generator draws the steps' noise; None: the model's
    # (signal, sigma) of each step, whose x_t is signal * x_0 + sigma * noise, as the scheduler's `add_noise`. Only in
    # schedules that begin at a chosen step.
    shares: tuple[tuple[float, float], ...] = ()

    def __len__(self) -> int:
        return len(self.timesteps)

    def to(self, device: torch.device | str) -> "Schedule":
        """Return a copy with its rows on `device`."""
        return replace(self, rows=upload(self.rows, torch.device(device)))

    def first(self, count: int) -> "Schedule":
        """Return the first `count` steps."""
        return replace(
            self,
            timesteps=self.timesteps[:count],
            rows=self.rows[:count],
            draws_noise=self.draws_noise[:count],
            shares=self.shares[:count],
        )

    def since(self, first: int, shares: Tensor) -> "Schedule":
        """Return the steps from `first` on. `shares` are (steps, 2) of the whole run."""
        return replace(
            self,
            timesteps=self.timesteps[first:],
            rows=self.rows[first:],
            draws_noise=self.draws_noise[first:],
            shares=tuple((signal, sigma) for signal, sigma in shares[first:].tolist()),
        )


def step_options(config: SchedulerConfig) -> StepOptions:
    """Return what all steps of `config` share: how x0 is thresholded, and the source of the variance."""
    if isinstance(config, ThresholdingConfig) and config.thresholding:
        return StepOptions(
            threshold_ratio=config.dynamic_thresholding_ratio,
            threshold_max=config.sample_max_value,
            variance=config.variance,
        )
    return StepOptions(variance=config.variance)


def clip_range(config: DiffusionConfig) -> float:
    """Return the column of this name: how far x0 is clipped; 0 if it is not. Thresholding replaces clipping."""
    thresholds = isinstance(config, ThresholdingConfig) and config.thresholding
    if isinstance(config, ClippingConfig) and config.clip_sample and not thresholds:
        return config.clip_sample_range
    return 0.0


def stack_columns(
    columns: Mapping[str, Tensor], config: DiffusionConfig, timesteps: Tensor, alpha_bar: Tensor
) -> Tensor:
    """Return the rows of steps, (steps, len(COLUMNS)) float32. `config` gives clip_range; missing columns are zero.

    Args:
        columns: The sampler's columns by name, (steps,) float64 each.
        config: The sampler's options.
        timesteps: (steps,) int64, for the message.
        alpha_bar: The value at each timestep, for the message.

    Raises InputError that names the option that leaves a step undefined.
    """
    clip = clip_range(config)
    shared = {"clip_range": torch.full_like(alpha_bar, clip), "input_div": torch.ones_like(alpha_bar)}
    rows = _stack({**columns, **shared}, alpha_bar)
    undefined = ~rows.isfinite().all(dim=1)
    if not clip:  # clipping makes an infinite x0 finite, as in diffusers
        undefined |= columns["x0_div"] == 0
    if undefined.any():
        first = int(undefined.nonzero()[0])
        raise _undefined_step(int(timesteps[first]), alpha_bar[first].item(), bool(rows[first].isfinite().all()))
    return rows.float()


def stack_sigma_columns(columns: Mapping[str, Tensor], sigmas: Tensor) -> Tensor:
    """Return the rows of steps that begin at `sigmas` (steps,), as `stack_columns` does.

    With the schedule's `scales_input`, the model sees x_t divided by sqrt(sigma^2 + 1) (Karras et al. 2022, table 1).
    Raises InputError that names an undefined step.
    """
    rows = _stack({**columns, "input_div": (sigmas**2 + 1).sqrt()}, sigmas)
    undefined = ~rows.isfinite().all(dim=1)
    if undefined.any():
        raise undefined_sigma_step(int(undefined.nonzero()[0]), sigmas)
    return rows.float()


def undefined_sigma_step(index: int, sigmas: Tensor) -> InputError:
    """Return the error for a step without a solution, of the steps that begin at `sigmas` (steps,)."""
    return InputError(
        f"step {index + 1} of {len(sigmas)} is undefined at sigma {sigmas[index]:g}; use other sigmas or betas"
    )


def _stack(columns: Mapping[str, Tensor], like: Tensor) -> Tensor:
    zero = torch.zeros_like(like)
    return torch.stack([columns.get(name, zero) for name in COLUMNS], dim=1)


def _undefined_step(timestep: int, alpha_bar: float, finite: bool) -> InputError:
    """Return the error for the first undefined step. `finite`: its row is finite, but it divides by zero."""
    if finite:
        return InputError(
            f"prediction_type epsilon divides by the signal, which is zero at timestep {timestep}; use "
            "v_prediction, clip_sample, timestep_spacing leading, or betas without rescale_betas_zero_snr"
        )
    return InputError(
        f"the betas define no step at timestep {timestep}, where alpha_bar is {alpha_bar:g}; change beta_start, "
        "beta_end or trained_betas, so that each beta is above 0 and below 1"
    )
