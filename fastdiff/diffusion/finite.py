"""Find the step at which a run went wrong: the first one whose state is NaN or infinite."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fastdiff.errors import NonFiniteError
from fastdiff.samplers.shared.schedule import Schedule


class Extremes:
    """The largest `|x|` after each step, or NaN. One small kernel per step, read only after an error."""

    def __init__(self, schedule: Schedule, device: torch.device):
        self._schedule = schedule
        self._largest = torch.zeros(len(schedule), device=device)
        self._noted: list[int] = []

    @torch.inference_mode()  # an inference tensor can be updated only in inference mode
    def note(self, step: int, x: Tensor) -> None:
        """Record the state x (N, H, W, C) float32 after a step, without waiting for the device."""
        torch.linalg.vector_norm(x, math.inf, out=self._largest[step])
        self._noted.append(step)

    @contextmanager
    def naming_step(self) -> Iterator[None]:
        """Add the step to a NonFiniteError of the block. If all states were finite, the error is raised unchanged."""
        try:
            yield
        except NonFiniteError:
            wrong = (~self._largest.isfinite()).nonzero()
            if not len(wrong):
                raise
            first = int(wrong[0])
            when = "at" if first - 1 in (-1, *self._noted) else "at or before"
            raise NonFiniteError(
                f"the model's output is NaN or infinite {when} step {first + 1} of {len(self._schedule)} "
                f"(timestep {int(self._schedule.timesteps[first])}); try --dtype float32, or check the model's weights"
            ) from None
