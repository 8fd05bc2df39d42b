"""Trajectories (N, C, L), with C channels at L positions: horizon, known values, order by value, and a call's result.

The models see trajectories as pictures of one line, (N, 1, L, C).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastdiff.arguments import as_int, shown
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.diffusion.decoding import check_finite
from fastdiff.errors import InputError
from fastdiff.execution.tensors import REAL
from fastdiff.kinds import Horizon
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked

TrajectoryOutputType = Literal["np", "pt"]
MOST_VALUES = 2**24  # per position; checked first, because reading a huge view or range would fill the memory


@read_by_name
class TrajectoryOutput(NamedTuple):
    """The result of planning.

    `trajectories` is (N, C, L) float32, numpy or torch, in the scale of the model's training data. Nothing is rescaled
    or clamped.

    `values` is (N,) float32 of the same type, if the trajectories are sorted by value, the best first. It is None if
    they are not sorted.
    """

    trajectories: Any
    values: Any = None


class KnownValues(NamedTuple):
    """The known elements of a batch of trajectories, on the model's device."""

    mask: Tensor  # (L, C) bool
    values: Tensor  # (N, 1, L, C) float32, or (1, 1, L, C) for all trajectories

    def set_in(self, x: Tensor) -> Tensor:
        """Set the known elements of x (N, 1, L, C) float32 in place, and return x. One launch, without a sync."""
        return torch.where(self.mask, self.values, x, out=x)

    def begin(self, x_t: Tensor) -> Tensor:
        """As `loop.Known`."""
        return self.set_in(x_t.clone())

    def set_after(self, step: int, x: Tensor) -> None:
        """As `loop.Known`: the values are the same after each step."""
        self.set_in(x)


def trajectory_shape(config: DenoiserConfig, horizon: Any, latents: Tensor | None) -> tuple[int, int, int]:
    """Return the denoiser's (C, 1, L). L is `horizon`, the horizon of `latents`, or the config's.

    Raises InputError if there is no horizon, or if the model cannot plan it.
    """
    horizon = checked("horizon", horizon, Horizon | None)
    if latents is not None:
        if horizon not in (None, latents.shape[2]):
            raise InputError(f"latents: their horizon is {latents.shape[2]}, but horizon is {horizon}; leave it out")
        horizon = latents.shape[2]
    size = config.complete_size(1, horizon)
    if size is None:
        raise InputError("horizon: this model's config has none; give the number of positions to plan")
    return config.sample_channels, *size


def read_conditions(conditions: Any) -> dict[int, Tensor]:
    """Return the values of each position in `conditions`, (k,) or (N, k) float32 each.

    Raises InputError unless `conditions` maps whole numbers to real numbers, and for NaN or infinity in CPU tensors.
    """
    if conditions is None:
        return {}
    if not isinstance(conditions, Mapping):
        raise InputError(f"conditions: {shown(conditions)} is not a mapping; give {{position: values}}")
    found: dict[int, Tensor] = {}
    for key, values in conditions.items():
        position = as_int(key)
        if position is None:
            raise InputError(f"conditions: position {shown(key)} is not a whole number; count positions from 0")
        if position in found:
            raise InputError(f"conditions: position {position} is given twice; give it once")
        found[position] = _read_values(f"conditions[{position}]", values)
    return found


def known_rows(conditions: Mapping[int, Tensor]) -> int | None:
    """Return the number of trajectories in `conditions`, or None if all values are shared by all trajectories."""
    rows = {len(values) for values in conditions.values() if values.ndim == 2}
    if len(rows) > 1:
        raise InputError(
            f"conditions: the values are for {' and '.join(map(str, sorted(rows)))} trajectories; give (k,) for all, "
            "or (N, k) with one row for each"
        )
    return rows.pop() if rows else None


def place_conditions(
    conditions: Mapping[int, Tensor], horizon: int, channels: int, device: torch.device
) -> KnownValues | None:
    """Return `conditions` as known values of trajectories of `horizon` positions, or None if there are none.

    The values (k,) or (N, k) of a position belong to the last k channels, because diffusers'
    ValueGuidedRLPipeline.reset_x0 sets the observations, which come after the actions. Raises InputError for a position
    outside the horizon, and for more values than channels.
    """
    if not conditions:
        return None
    mask = torch.zeros(horizon, channels, dtype=torch.bool)
    placed = torch.zeros(known_rows(conditions) or 1, 1, horizon, channels, device=device)
    for position, values in conditions.items():
        width = values.shape[-1]
        if not 0 <= position < horizon:
            raise InputError(
                f"conditions: position {shown(position)} is outside horizon {horizon}; positions are 0 to {horizon - 1}"
            )
        if width > channels:
            raise InputError(
                f"conditions[{position}]: {width} values for {channels} channels; give at most one per channel"
            )
        mask[position, channels - width :] = True
        placed[:, 0, position, channels - width :] = values.to(device)
    return KnownValues(mask.to(device), placed)


def decode_trajectories(x: Tensor, output_type: str) -> Any:
    """Return x_0 (N, 1, L, C) float32 as trajectories. Raises NonFiniteError for NaN or infinity."""
    checked("output_type", output_type, TrajectoryOutputType)
    check_finite(x)
    trajectories = x[:, 0].transpose(1, 2).contiguous()
    return trajectories if output_type == "pt" else trajectories.cpu().numpy()


def sort_trajectories(trajectories: Any, values: Tensor) -> TrajectoryOutput:
    """Sort decoded trajectories by their values (N,), the best first. Trajectories with equal values keep their order.

    Raises NonFiniteError for NaN or infinity among the values.
    """
    check_finite(values)
    values, order = values.sort(descending=True, stable=True)
    if isinstance(trajectories, Tensor):
        return TrajectoryOutput(trajectories[order], values)
    return TrajectoryOutput(trajectories[order.cpu().numpy()], values.cpu().numpy())


def _read_values(name: str, values: Any) -> Tensor:
    wanted = f"give (k,) or (N, k) numbers, at most {MOST_VALUES}"
    try:
        is_readable = _count(values) <= MOST_VALUES
        found = torch.tensor(np.array(values, order="C")) if is_readable and not isinstance(values, Tensor) else values
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{name}: {shown(values)} is not numeric; {wanted}") from None
    if not is_readable:
        raise InputError(f"{name}: {shown(values)} is too many numbers; {wanted}")
    is_dense = found.layout == torch.strided and not found.is_meta
    if found.ndim not in (1, 2) or not found.numel() or found.dtype not in REAL or not is_dense:
        raise InputError(
            f"{name}: it has shape {tuple(found.shape)} and dtype {found.dtype}; give dense real numbers, (k,) for all "
            "trajectories or (N, k) with one row for each"
        )
    found = found.detach().float()
    if found.device.type == "cpu" and not found.isfinite().all():  # checking a GPU tensor would wait for the GPU
        raise InputError(f"{name}: it holds NaN or infinity; give finite numbers")
    return found


def _count(values: Any) -> int:
    """Return how many numbers an array, a number or a nested list holds.

    For a list that is too long, return any number above MOST_VALUES.
    """
    if not isinstance(values, list | tuple | range):
        return math.prod(getattr(values, "shape", ()))
    if values[MOST_VALUES : MOST_VALUES + 1]:
        return MOST_VALUES + 1
    return len(values) if isinstance(values, range) else sum(map(_count, values))
