"""The timesteps of a run, and the target timestep of each step."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastdiff.arguments import as_int, shown
from fastdiff.errors import InputError
from fastdiff.execution.tensors import WHOLE
from fastdiff.samplers.shared.options import DiffusionConfig, DistilledConfig, SchedulerConfig
from fastdiff.schema import checked


def spaced_timesteps(config: DiffusionConfig, num_inference_steps: int) -> Tensor:
    """Return the timesteps of a run, descending: (num_inference_steps,) int64 (Lin et al. 2024, table 2).

    Raises InputError for a number of steps that is not from 1 to the number of training steps, and for an offset that
    moves a timestep outside the training steps.
    """
    steps, total = checked_steps(config, num_inference_steps), config.num_train_timesteps
    timesteps: np.ndarray
    if config.timestep_spacing == "linspace":
        timesteps = np.linspace(0, total - 1, steps).round()[::-1]
    elif config.timestep_spacing == "trailing":
        # arange may round to one value too many, which would be timestep -1
        timesteps = np.round(np.arange(total, 0, -total / steps))[:steps] - 1
    else:
        timesteps = np.arange(steps)[::-1] * (total // steps) + config.steps_offset
    return torch.from_numpy(check_within(config, timesteps).astype(np.int64))


def checked_steps(config: SchedulerConfig, num_inference_steps: Any) -> int:
    """Return the number of steps as an int. Raises InputError unless it is from 1 to the number of training steps."""
    steps, total = as_int(num_inference_steps), config.num_train_timesteps
    if steps is None:
        raise InputError(f"num_inference_steps is {shown(num_inference_steps)}; it must be a whole number")
    if not 1 <= steps <= total:
        raise InputError(f"num_inference_steps is {shown(steps)}; it must be from 1 to the {total} training steps")
    return steps


def check_within(config: DiffusionConfig, timesteps: np.ndarray) -> np.ndarray:
    """Return `timesteps`. Raises InputError if an offset moves one outside the training steps."""
    last = config.num_train_timesteps - 1
    if timesteps.max() > last or timesteps.min() < 0:
        raise InputError(
            f"steps_offset {config.steps_offset} moves {len(timesteps)} steps to timesteps {timesteps.min():g} to "
            f"{timesteps.max():g}, outside the training's 0 to {last}; use fewer steps or timestep_spacing trailing"
        )
    return timesteps


def custom_timesteps(config: DiffusionConfig, timesteps: Sequence[int]) -> Tensor:
    """Return `timesteps` as a tensor, (steps,) int64.

    Raises InputError unless they descend and lie within the training steps.
    """
    last = config.num_train_timesteps - 1
    try:
        chain = torch.as_tensor(timesteps)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"timesteps: {shown(timesteps)} is not a list of whole numbers") from None
    if chain.ndim != 1 or len(chain) == 0 or chain.dtype not in WHOLE or chain.is_meta:
        raise InputError("timesteps is not a list of whole numbers; give at least one")
    return torch.tensor(_descending("timesteps", chain.tolist(), last))


def custom_numbers(name: str, values: Sequence[float], most: float = math.inf, *, count: int = 1) -> np.ndarray:
    """Return a caller's timesteps or sigmas, (steps,) float64.

    Args:
        name: The name of the argument.
        values: A list, tensor or array of numbers.
        most: The largest number that the run can begin with.
        count: The least length.

    Raises InputError unless they are at least `count` numbers that descend from at most `most` to at least 0.
    """
    given = checked(name, values, tuple[float, ...])
    if len(given) < count:
        raise InputError(f"{name}: {len(given)} given; give at least {count}")
    return np.array(_descending(name, given, most))


def _descending(name: str, values: Sequence[float], most: float) -> Sequence[float]:
    if any(after >= before for before, after in pairwise(values)):
        raise InputError(f"{name} do not descend; give each once, from noise to picture")
    if values[0] > most or values[-1] < 0:
        bounds = f"the training's {most:g} to 0" if most < math.inf else "their range; give none below 0"
        raise InputError(f"{name} {values[0]:g} to {values[-1]:g} are outside {bounds}")
    return values


def chosen_timesteps(
    config: DiffusionConfig, num_inference_steps: int | None, timesteps: Sequence[int] | None
) -> Tensor:
    """Return a run's timesteps, spaced or custom, (steps,) int64. InputError unless exactly one of the two is given."""
    if timesteps is None and num_inference_steps is not None:
        return spaced_timesteps(config, num_inference_steps)
    if timesteps is not None and num_inference_steps is None:
        return custom_timesteps(config, timesteps)
    raise InputError("give either num_inference_steps or timesteps")


def distilled_timesteps(config: DistilledConfig, original_steps: int | None, strength: float) -> np.ndarray:
    """Return the timesteps that a model was distilled at, ascending, (original_steps * strength,) int64.

    Args:
        config: The scheduler's options.
        original_steps: How many timesteps the model was distilled at; None: the config's original_inference_steps.
        strength: The fraction of them to return, beginning with the least noisy.

    Raises InputError for more original steps than training steps.
    """
    total = config.num_train_timesteps
    original = config.original_inference_steps if original_steps is None else original_steps
    if original > total:
        raise InputError(f"original_inference_steps is {original}; it must be at most the {total} training steps")
    return np.arange(1, int(original * strength) + 1) * (total // original) - 1


def following_in_list(timesteps: Tensor) -> Tensor:
    """Return the target of each step as in DDPM, (steps,) int64: the next timestep of the list, -1 after the last."""
    return torch.cat([timesteps[1:], timesteps.new_tensor([-1])])


def following_by_stride(config: DiffusionConfig, timesteps: Tensor, num_inference_steps: int) -> Tensor:
    """Return the target of each step as in DDIM, (steps,) int64: a fixed stride down, negative after the last.

    With timestep_spacing linspace, the target is not the next timestep of the list.
    """
    return timesteps - config.num_train_timesteps // num_inference_steps
