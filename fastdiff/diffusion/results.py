"""The results of a pipeline: the state after each step, and the finished pictures. `Streams` is the pipeline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor

from fastdiff.diffusion.decoding import decode
from fastdiff.diffusion.trajectories import TrajectoryOutput
from fastdiff.execution.memory import smaller_portions
from fastdiff.outputs import read_by_name


@read_by_name
class PipelineOutput(NamedTuple):
    """The result of a pipeline.

    `images` is a list of PIL images, or float32 in [0, 1]: (N, H, W, C) numpy or (N, C, H, W) torch. `output_type`
    selects which.
    """

    images: list[Image.Image]  # PIL images; with another `output_type` an array, which is Any for type checkers


@dataclass(frozen=True)
class Step:
    """The state after a step. `Pipeline.stream` yields one for each step."""

    index: int  # 0 to num_steps - 1
    num_steps: int
    timestep: float  # a whole number for most schedulers
    x_t: Tensor  # (N, H, W, C) float32, the state after the step; latents if the pipeline has a VAE
    x0: Tensor  # (N, H, W, C) float32, the current prediction of the final state; (N, 1, L, C) for trajectories
    at_once: int  # how many pictures are computed together: fewer than N if more do not fit in memory
    finish: Callable[[], Any] | None = None  # after the last step: waits for the finished pictures and returns them
    decoder: Callable[[Tensor, str], Any] = decode  # decodes x_t or x0 to an output type
    small: Callable[[Tensor], Tensor] | None = None  # shrinks x0 for a preview, if the whole would take long
    draft: Callable[[Tensor], Any] | None = None  # decodes x0 for a preview without the pipeline's own VAE
    trajectories: TrajectoryOutput | None = None  # the finished trajectories after the last step, instead of pictures

    @property
    def images(self) -> Any:
        """The finished pictures after the last step; None before.

        Raises the error of the run, if the run did not wait for its pictures.
        """
        if self.finish is None:
            return None
        if "_images" not in vars(
            self
        ):  # the lock of Python 3.11's cached_property is for all steps, and `finish` waits
            vars(self)["_images"] = self.finish()
        return vars(self)["_images"]

    @property
    def notice(self) -> str | None:
        """A one-line notice if not all pictures are computed together, else None."""
        return smaller_portions(len(self.x_t), self.at_once)

    def preview(self) -> list[Image.Image]:
        """Return PIL images of the current prediction `x0`: a preview that sharpens from step to step.

        Previews of large latents are smaller than the final pictures, unless the pipeline has a `preview_vae`. Without
        it, previews of Z-Image have a pixel for each latent, with approximate colours. Raises InputError for
        trajectories.
        """
        if self.draft is not None:
            return self.draft(self.x0)
        return self.decoder(self.x0 if self.small is None else self.small(self.x0), "pil")


class Streams(Protocol):
    """The interface of a pipeline that a run needs: it draws pictures step by step."""

    @property
    def device(self) -> torch.device:
        """The device of the models."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the denoiser."""

    @property
    def scheduler_name(self) -> str:
        """The scheduler's name in requests."""

    def stream(self, **options: Any) -> Iterator[Step]:
        """Draw pictures, and yield a `Step` after each step."""
