"""Results of a pipeline: the state after each step, and the finished pictures. `Streams` is what makes them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor

from fastdiff.diffusion.decoding import decode
from fastdiff.diffusion.trajectories import TrajectoryOutput
from fastdiff.execution.memory import smaller_portions


class PipelineOutput(NamedTuple):
    """images: PIL images, or (N, H, W, C) numpy or (N, C, H, W) torch float32 in [0, 1], as `output_type` asks."""

    images: Any


@dataclass(frozen=True)
class Step:
    """The state after a step, as `Pipeline.stream` yields it."""

    index: int  # 0 to num_steps - 1
    num_steps: int
    timestep: float  # a whole number for most schedulers
    x_t: Tensor  # (N, H, W, C) float32, the state after the step; latents where the pipeline has a VAE
    x0: Tensor  # (N, H, W, C) float32, the end of it as the model predicts it now; of trajectories (N, 1, L, C)
    at_once: int  # pictures that were computed together: fewer than all where more do not fit in memory
    finish: Callable[[], Any] | None = None  # after the last step: waits for the finished pictures, and returns them
    decoder: Callable[[Tensor, str], Any] = decode  # of x_t or x0, and an output type
    small: Callable[[Tensor], Tensor] | None = None  # of x0: less of it for a preview, where all would take long
    trajectories: TrajectoryOutput | None = None  # the finished trajectories after the last step, instead of pictures

    @cached_property
    def images(self) -> Any:
        """The finished pictures after the last step, else None. Raises as what drew them, where that did not wait."""
        return None if self.finish is None else self.finish()

    @property
    def notice(self) -> str | None:
        """A line that says so where not all pictures were computed together."""
        return smaller_portions(len(self.x_t), self.at_once)

    def preview(self) -> list[Image.Image]:
        """The finished pictures as the model predicts them now: a preview that sharpens step by step.

        Of large latents it is smaller than the pictures will be. InputError for trajectories, which are no pictures.
        """
        return self.decoder(self.x0 if self.small is None else self.small(self.x0), "pil")


class Streams(Protocol):
    """Draws, step by step: a pipeline, as a run needs it."""

    @property
    def device(self) -> torch.device:
        """Where the models work."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the denoiser."""

    @property
    def scheduler_name(self) -> str:
        """The scheduler's name in requests."""

    def stream(self, **options: Any) -> Iterator[Step]:
        """Draw pictures, and yield a Step after each step."""
