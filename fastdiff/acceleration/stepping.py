"""Give a live diffusers scheduler its timesteps on the CPU, so that its steps do not wait for the GPU.

A pipeline of diffusers keeps the timesteps on the GPU, and `step` reads alphas on the CPU by them: PNDM and DDIM wait
for the denoiser at each step, and the GPU is idle until the next one is launched. With the same timestep on the CPU,
`step` computes the same bits and does not wait.
"""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastdiff.acceleration.recall import place_in_vector
from fastdiff.sampler_names import SAMPLERS


class HostTimesteps:
    """A copy on the CPU of the vector of timesteps that a loop reads. It is made at the loop's first step."""

    def __init__(self) -> None:
        self._copied: tuple[weakref.ref[Tensor], int, Tensor] | None = None  # the vector, its writes, the copy

    def find(self, timestep: Any) -> Any:
        """Return the copy of an element of a vector on a GPU. Return anything else as it is."""
        if not isinstance(timestep, Tensor) or timestep.device.type == "cpu" or timestep.ndim:
            return timestep
        place = None if timestep.is_inference() else place_in_vector(timestep)  # torch counts no writes to it
        if place is None:
            return timestep
        vector, index = place
        if self._copied is None or self._copied[0]() is not vector or self._copied[1] != vector._version:
            self._copied = weakref.ref(vector), vector._version, vector.cpu()
        return self._copied[2][index]


def install(scheduler: Any) -> None:
    """Replace the `step` of a live diffusers scheduler that we have too. Leave any other object as it is."""
    kind = type(scheduler)
    known = kind.__name__ in SAMPLERS and kind.__module__.partition(".")[0] == "diffusers"
    if known and "step" not in vars(scheduler):
        scheduler.step = types.MethodType(_stepping(kind.step), scheduler)


def remove(scheduler: Any) -> None:
    """Restore the scheduler's own `step`, if `install` replaced it."""
    if hasattr(getattr(scheduler, "step", None), "host_timesteps"):
        del scheduler.step


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `step` with the same signature, which pipelines inspect."""
    timesteps = HostTimesteps()

    @functools.wraps(step)
    def with_host_timestep(self: Any, model_output: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        return step(self, model_output, timesteps.find(timestep), *args, **kwargs)

    with_host_timestep.host_timesteps = timesteps  # type: ignore[attr-defined]  # `remove` knows it by this
    return with_host_timestep
