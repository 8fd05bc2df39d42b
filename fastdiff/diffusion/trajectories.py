"""Trajectories, (N, C, L): C channels at L positions. Their horizon L, what is known of them before they are planned,
their order by value, and what a call returns.

The models see them as pictures of one line, (N, 1, L, C).
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
from fastdiff.schema import checked

TrajectoryOutputType = Literal["np", "pt"]
MOST_VALUES = 2**24  # of one position: a view or a range of any length takes memory only where it is read


class TrajectoryOutput(NamedTuple):
    """trajectories: (N, C, L) float32, numpy or torch, as the model was trained: nothing is scaled or clamped.

    values: (N,) float32 of the same kind, by which they are sorted, best first; None where they are not sorted.
    """

    trajectories: Any
    values: Any = None


class KnownValues(NamedTuple):
    """The known elements of a batch of trajectories, on the model's device."""

    mask: Tensor  # (L, C) bool
    values: Tensor  # (N, 1, L, C) float32, or (1, 1, L, C) for all

    def set_in(self, x: Tensor) -> Tensor:
        """Set them in x (N, 1, L, C) float32, in place, and return it. One launch, which waits for nothing."""
        return torch.where(self.mask, self.values, x, out=x)


def trajectory_shape(config: DenoiserConfig, horizon: Any, latents: Tensor | None) -> tuple[int, int, int]:
    """Return (C, 1, L) of what a denoiser plans: L is the horizon asked for, that of `latents`, or the config's.

    Raises InputError where there is none, or none that the model can plan.
    """
    horizon = checked("horizon", horizon, Horizon | None)
    if latents is not None:
        if horizon not in (None, latents.shape[2]):
            raise InputError(f"latents: their horizon is {latents.shape[2]}, and horizon is {horizon}; leave it out")
        horizon = latents.shape[2]
    size = config.complete_size(1, horizon)
    if size is None:
        raise InputError("horizon: this model's config does not say its own; give the number of positions to plan")
    return config.sample_channels, *size


def read_conditions(conditions: Any) -> dict[int, Tensor]:
    """Return the values of each position that `conditions` names, (k,) or (N, k) float32 each.

    Raises InputError for what is no mapping of whole numbers to real numbers, and for NaN among those of the CPU.
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
    """Return the number of trajectories that `conditions` speak of; None where their values are for all."""
    rows = {len(values) for values in conditions.values() if values.ndim == 2}
    if len(rows) > 1:
        raise InputError(
            f"conditions: they have values of {' and '.join(map(str, sorted(rows)))} trajectories; give (k,) for all, "
            "or (N, k) with a row for each"
        )
    return rows.pop() if rows else None


def place_conditions(
    conditions: Mapping[int, Tensor], horizon: int, channels: int, device: torch.device
) -> KnownValues | None:
    """Return `conditions` as known values of trajectories of `horizon` positions; None where there are none.

    The values (k,) or (N, k) of a position are those of the last k channels, as diffusers'
    ValueGuidedRLPipeline.reset_x0 sets observations behind actions. Raises InputError for a position beyond the
    horizon, and for more values than there are channels.
    """
    if not conditions:
        return None
    mask = torch.zeros(horizon, channels, dtype=torch.bool)
    placed = torch.zeros(known_rows(conditions) or 1, 1, horizon, channels, device=device)
    for position, values in conditions.items():
        width = values.shape[-1]
        if not 0 <= position < horizon:
            raise InputError(
                f"conditions: position {shown(position)} is not one of horizon {horizon}; they are 0 to {horizon - 1}"
            )
        if width > channels:
            raise InputError(
                f"conditions[{position}]: {width} values for trajectories of {channels} channels; give at most as many"
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
    """Return decoded trajectories by their values (N,), the best first, and in the order of their seeds where two are
    alike. Raises NonFiniteError for NaN or infinity among the values.
    """
    check_finite(values)
    values, order = values.sort(descending=True, stable=True)
    if isinstance(trajectories, Tensor):
        return TrajectoryOutput(trajectories[order], values)
    return TrajectoryOutput(trajectories[order.cpu().numpy()], values.cpu().numpy())


def _read_values(name: str, values: Any) -> Tensor:
    wanted = f"give (k,) of them, or (N, k), up to {MOST_VALUES}"
    try:
        is_readable = _count(values) <= MOST_VALUES
        found = torch.tensor(np.array(values, order="C")) if is_readable and not isinstance(values, Tensor) else values
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{name}: {shown(values)} is not numbers; {wanted}") from None
    if not is_readable:
        raise InputError(f"{name}: {shown(values)} is too many numbers; {wanted}")
    is_dense = found.layout == torch.strided and not found.is_meta
    if found.ndim not in (1, 2) or not found.numel() or found.dtype not in REAL or not is_dense:
        raise InputError(
            f"{name}: it is of shape {tuple(found.shape)}, {found.dtype}; give dense real numbers, (k,) for all "
            "trajectories or (N, k) with a row for each"
        )
    found = found.detach().float()
    if found.device.type == "cpu" and not found.isfinite().all():  # to look at a GPU's would wait for it
        raise InputError(f"{name}: it holds NaN or infinity; give finite numbers")
    return found


def _count(values: Any) -> int:
    """Return how many numbers an array, a number, or a list of them holds; of a long list some that are too many."""
    if not isinstance(values, list | tuple | range):
        return math.prod(getattr(values, "shape", ()))
    if values[MOST_VALUES : MOST_VALUES + 1]:
        return MOST_VALUES + 1
    return len(values) if isinstance(values, range) else sum(map(_count, values))
