"""Schedule: the steps of a run as data. A sampler makes its rows, and one step function serves all samplers.

A row has the coefficients of a step: `fastdiff.kernels.device.denoise.COLUMNS` names them and says how they are used.
Rows are computed in float64 and stored in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.execution.transfers import upload
from fastdiff.kernels.denoise import COLUMNS, StepOptions
from fastdiff.samplers.shared.options import ClippingConfig, DiffusionConfig, ThresholdingConfig


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of a run, made once.

    A step is a call of the model. A sampler that needs more of a step adds a column: its name and its use to COLUMNS
    and `denoise_step`, its values to its own rows. The rows of all other samplers hold zero there.
    """

    timesteps: Tensor  # (steps,) int64 or float32, on the CPU: what the model is told
    rows: Tensor  # (steps, len(COLUMNS)) float32
    options: StepOptions
    draws_noise: tuple[bool, ...]  # per step, whether noise is added to it
    init_noise_sigma: float = 1.0  # the deviation of the noise that it starts from
    scales_input: bool = False  # whether the model sees x_t divided by input_div
    # Per step, whether its output is kept among the earlier ones; None for a sampler that reads none
    keeps_output: tuple[bool, ...] | None = None
    noise_dtype: torch.dtype | None = None  # that a generator draws the steps' noise in; None: the model's

    def __len__(self) -> int:
        return len(self.timesteps)

    def to(self, device: torch.device | str) -> "Schedule":
        """Return the same with its rows on `device`."""
        return replace(self, rows=upload(self.rows, torch.device(device)))


def step_options(config: DiffusionConfig) -> StepOptions:
    """Return what every step of `config` has in common: how x0 is clipped, and where the variance comes from."""
    if isinstance(config, ThresholdingConfig) and config.thresholding:
        return StepOptions(
            threshold_ratio=config.dynamic_thresholding_ratio,
            threshold_max=config.sample_max_value,
            variance=config.variance,
        )
    if isinstance(config, ClippingConfig) and config.clip_sample:
        return StepOptions(clip_range=config.clip_sample_range, variance=config.variance)
    return StepOptions(variance=config.variance)


def stack_columns(
    columns: Mapping[str, Tensor], config: DiffusionConfig, timesteps: Tensor, alpha_bar: Tensor
) -> Tensor:
    """Return the rows of steps, (steps, len(COLUMNS)) float32; a column that is not given is zero.

    columns    a sampler's columns by name, (steps,) float64 each
    timesteps  (steps,) int64, and alpha_bar at each of them, for the message

    Raises InputError naming the option that leaves a step undefined.
    """
    rows = _stack(columns, alpha_bar)
    undefined = ~rows.isfinite().all(dim=1)
    if step_options(config).clip_range is None:  # clipping brings an infinite x0 back, as it does in diffusers
        undefined |= columns["x0_div"] == 0
    if undefined.any():
        first = int(undefined.nonzero()[0])
        raise _undefined_step(int(timesteps[first]), alpha_bar[first].item(), bool(rows[first].isfinite().all()))
    return rows.float()


def stack_sigma_columns(columns: Mapping[str, Tensor], sigmas: Tensor) -> Tensor:
    """Return the rows of steps from `sigmas` (steps,) on, as `stack_columns`. InputError where there is no such step.

    The model sees x_t divided by sqrt(sigma^2 + 1), where the schedule `scales_input` (Karras et al. 2022, table 1).
    """
    rows = _stack({**columns, "input_div": (sigmas**2 + 1).sqrt()}, sigmas)
    undefined = ~rows.isfinite().all(dim=1)
    if undefined.any():
        first = int(undefined.nonzero()[0])
        raise InputError(
            f"step {first + 1} of {len(sigmas)} cannot be, from sigma {sigmas[first]:g}; use other sigmas, or betas"
        )
    return rows.float()


def _stack(columns: Mapping[str, Tensor], like: Tensor) -> Tensor:
    zero = torch.zeros_like(like)
    return torch.stack([columns.get(name, zero) for name in COLUMNS], dim=1)


def _undefined_step(timestep: int, alpha_bar: float, finite: bool) -> InputError:
    """Return the error of the first step that cannot be; `finite`: its row is, but it divides by zero."""
    if finite:
        return InputError(
            f"prediction_type epsilon divides by the signal, of which none is left at timestep {timestep}; use "
            "v_prediction, clip_sample, timestep_spacing leading, or betas without rescale_betas_zero_snr"
        )
    return InputError(
        f"the betas give no step at timestep {timestep}, where alpha_bar is {alpha_bar:g}; they are above 0 and "
        "below 1: change beta_start, beta_end or trained_betas"
    )
