"""The denoising loop: x_t -> x_{t-1}, row by row of the schedule, for a batch whose every picture stands for itself.

The same seed gives the same bits alone, in any batch and at any place in it. On the CPU a batched convolution of torch
does not keep that promise, so there each picture is computed on its own, by a fixed number of threads.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.diffusion.conditioning import Guidance, Table
from fastdiff.diffusion.schedule import Schedule
from fastdiff.execution.cpu_workers import map_pictures
from fastdiff.kernels.denoise import StepOptions, denoise_step
from fastdiff.models.denoiser import Conditioning, Denoiser

# Of the noise added in a step: each picture's seed (N,) int64 for Philox, or what draws the next (N, H, W, C).
NoiseSource = Tensor | Callable[[], Tensor]


def denoise(
    denoiser: Denoiser,
    x_t: Tensor,
    schedule: Schedule,
    table: Table,
    labels: Tensor,
    *,
    noise: NoiseSource,
    guidance: Guidance | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x_{t-1} and x0, each (N, H, W, C) float32, after every step.

    Args:
        x_t: (N, H, W, C) float32 on the model's device, the starting noise.
        labels: (N,) int64, each picture's row of `table`.
        noise: where the noise of a step comes from.
    """
    loop = _Loop(denoiser, schedule, table, labels, guidance)
    take_step = loop.step_by_picture if denoiser.device.type == "cpu" else loop.step_as_graph
    for i, draws in enumerate(schedule.draws_noise):
        x_t, x0 = take_step(x_t, i, (noise if isinstance(noise, Tensor) else noise()) if draws else None)
        yield x_t, x0


@dataclass(frozen=True)
class _Step:
    """A step as a function of tensors, with all else that it depends on, which a CUDA graph of it keeps alive."""

    denoiser: Denoiser
    options: StepOptions
    guidance_scale: float | None  # None: unguided

    def __call__(
        self, x_t: Tensor, temb: Tensor, timesteps: Tensor, rows: Tensor, step: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x_t (N, H, W, C) -> x_{t-1} and x0; a guided batch's two halves, one conditioning each, are one call."""
        guided = self.guidance_scale is not None
        x = x_t.to(self.denoiser.dtype)
        x = torch.cat([x, x]) if guided else x
        outputs = self.denoiser.predict(x, Conditioning(temb, timesteps)).split(len(x_t))
        output, unguided = outputs if guided else (*outputs, None)
        return self.update(output, unguided, x_t, rows, step, noise)

    def update(
        self, output: Tensor, unguided: Tensor | None, x_t: Tensor, rows: Tensor, step: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.options.variance == "fixed":  # a learned variance goes unused, as in diffusers' DiTPipeline
            output, unguided = (o if o is None else o[..., : x_t.shape[-1]] for o in (output, unguided))
        guidance = {"unguided": unguided, "guidance_scale": 1.0 if unguided is None else self.guidance_scale}
        return denoise_step(output, x_t, rows, self.options, **guidance, noise=noise, step=step)


@dataclass(frozen=True)
class _Loop:
    """What is the same in every step, and the two ways to take step i: x_t and its noise -> x_{t-1} and x0.

    The noise is (N, H, W, C), or the pictures' seeds (N,), or None.
    """

    denoiser: Denoiser
    schedule: Schedule
    table: Table
    labels: Tensor
    guidance: Guidance | None

    @functools.cached_property
    def step(self) -> _Step:
        return _Step(self.denoiser, self.schedule.options, self.guidance.scale if self.guidance else None)

    @functools.cached_property
    def steps(self) -> Tensor:
        return torch.arange(len(self.schedule), dtype=torch.int32, device=self.denoiser.device)

    @functools.cached_property
    def null_labels(self) -> Tensor:
        return torch.full_like(self.labels, self.guidance.null_row)

    @functools.cached_property
    def all_labels(self) -> Tensor:
        """Of both halves of a guided batch."""
        return torch.cat([self.labels, self.null_labels]) if self.guidance else self.labels

    def step_as_graph(self, x_t: Tensor, i: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """The whole batch at once."""
        run = self.denoiser.graphed((self.step.options, self.step.guidance_scale), self.step)
        given = (x_t, *self.table.at(i).of(self.all_labels), self.schedule.rows, self.steps[i : i + 1])
        return run(*given) if noise is None else run(*given, noise)

    def step_by_picture(self, x_t: Tensor, i: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Each picture, and each half of a guided one, in a model call of its own; the calls run side by side."""
        conditioning = self.table.at(i)

        def predict(x: Tensor, label: Tensor) -> Tensor:
            return self.denoiser.predict(x.to(self.denoiser.dtype), conditioning.of(label))

        pictures = x_t.split(1)
        nothing = [None] * len(pictures)
        outputs = map_pictures(predict, x_t, self.labels)
        unguided = map_pictures(predict, x_t, self.null_labels) if self.guidance else nothing
        noises = nothing if noise is None else noise.split(1)
        rows, step = self.schedule.rows, self.steps[i : i + 1]
        results = [
            self.step.update(*each, x, rows, step, z)
            for *each, x, z in zip(outputs, unguided, pictures, noises, strict=True)
        ]
        x_prev, x0 = zip(*results, strict=True)
        return torch.cat(x_prev), torch.cat(x0)
