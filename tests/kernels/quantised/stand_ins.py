"""numpy versions of Triton device functions, for the emulation of Gluon kernels. Arrays keep their class."""

from typing import TypeVar

import numpy as np
import torch

from fastdiff.kernels.host.weights import NUMBERS
from fastdiff.kernels.plans.cpu import ACTIVATIONS

Array = TypeVar("Array", bound=np.ndarray)

NAMED = {name: dtype for dtype, name in NUMBERS.items()}


def activate(x: Array, activation: str) -> Array:
    """Stand in for `device.math.activate`."""
    function = ACTIVATIONS[None if activation == "none" else activation]
    return function(torch.from_numpy(np.asarray(x))).numpy().view(type(x))


def rounded(x: Array, dtype: str) -> Array:
    """Stand in for `device.to_fp8.rounded`."""
    return torch.from_numpy(np.asarray(x)).to(NAMED[dtype]).float().numpy().view(type(x))


def magnitudes(x: Array) -> Array:
    """Stand in for `device.to_fp8.magnitudes`."""
    return np.where(np.isnan(x), np.float32(0), np.abs(x)).view(type(x))


def scale_and_factor(largest: Array, step: float, least: float) -> tuple[Array, Array]:
    """Stand in for `device.to_fp8.scale_and_factor`."""
    scale = np.maximum(largest, np.float32(least)) * np.float32(step)
    return scale, np.float32(1) / scale
