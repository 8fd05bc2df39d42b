"""The denoising loop: x_t -> x_{t-1}, one row of the schedule at a time, with pictures independent of their batch.

The same seed gives the same bits alone, in any batch and at any position in it. torch's batched convolutions on the CPU
do not keep that promise, so the CPU path computes each picture on its own, with a fixed number of threads.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastdiff.diffusion.conditioning import ConditioningTable
from fastdiff.diffusion.conditions import Conditions
from fastdiff.diffusion.trajectories import KnownValues
from fastdiff.execution.cpu_workers import map_in_turn, map_pictures
from fastdiff.execution.memory import Portions
from fastdiff.kernels.denoise import COLUMNS, EARLIER, StepOptions, denoise_step, keep
from fastdiff.models.blocks.conditioning import Conditioning
from fastdiff.models.blocks.protocols import DenoiserLike
from fastdiff.samplers.shared.noise import NoiseSource
from fastdiff.samplers.shared.schedule import Schedule

# Called with the index of a step and x_{t-1}; see `denoise`
AfterStep = Callable[[int, Tensor], tuple[Tensor, Conditions | None]]

ALL = slice(None)
INPUT_DIV = COLUMNS.index("input_div")


def denoise(
    denoiser: DenoiserLike,
    x_t: Tensor,
    schedule: Schedule,
    conditions: Conditions,
    *,
    noise: NoiseSource,
    portions: Portions,
    known: KnownValues | None = None,
    after_step: AfterStep | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x_{t-1} and x0, each (N, H, W, C) float32, after every step.

    Args:
        x_t: The starting noise, (N, H, W, C) float32 on the model's device, scaled by the schedule's init_noise_sigma.
        schedule: The steps, with rows on the model's device.
        conditions: The conditions of the N pictures, on the model's device.
        noise: The source of the steps' noise.
        portions: How many of the N pictures are computed together. If a portion does not fit in memory, it is computed
            again in smaller portions, and earlier steps stay valid.
        known: Known values of trajectories. They are set in x_t before the first step and after every step. x0 stays
            the model's prediction.
        after_step: Called with the index of a step and x_{t-1}. It returns the x_{t-1} that the next step starts from,
            and new conditions or None to keep them.

    Raises OutOfMemoryError.
    """
    loop = _Loop(denoiser, schedule, conditions)
    if known is not None:
        x_t = known.set_in(x_t.clone())  # the caller may own x_t
    earlier = None if schedule.keeps_output is None else (torch.zeros_like(x_t),) * EARLIER
    for i, draws in enumerate(schedule.draws_noise):
        z = (noise if isinstance(noise, Tensor) else noise()) if draws else None
        state: dict[str, Any] = {} if earlier is None else {"earlier": earlier}
        x_t, x0, *kept = _join(portions.map(functools.partial(loop.take_step, x_t, i, z, **state), len(x_t)))
        if earlier is not None and schedule.keeps_output is not None:
            earlier = keep(earlier, kept, schedule.keeps_output[i])
        if known is not None:
            known.set_in(x_t)
        if after_step is not None:
            x_t, changed = after_step(i, x_t)
            loop = loop if changed is None else replace(loop, conditions=changed)
        yield x_t, x0


def _join(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    if len(parts) == 1:  # no copy
        return parts[0]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


@dataclass(frozen=True)
class _Step:
    """A step as a function of tensors. Its fields are everything else that it depends on.

    A CUDA graph of the step keeps this object alive.
    """

    denoiser: DenoiserLike
    options: StepOptions
    guidance_scale: float | None  # None: no guidance
    guidance_rescale: float
    scales_input: bool

    def __call__(
        self,
        x_t: Tensor,
        conditioning: Conditioning,
        rows: Tensor,
        step: Tensor,
        earlier: tuple[Tensor, ...],
        noise: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return x_{t-1}, x0 and what the step keeps, from x_t (N, H, W, C).

        With guidance, one model call computes both halves; `conditioning` then has an entry for each picture of each.
        """
        guided = self.guidance_scale is not None
        x = self.input(x_t, rows, step)
        x = torch.cat([x, x]) if guided else x
        outputs = self.denoiser.predict(x, conditioning).split(len(x_t))
        output, unguided = outputs if guided else (*outputs, None)
        return self.update(output, unguided, x_t, rows, step, earlier, noise)

    def input(self, x_t: Tensor, rows: Tensor, step: Tensor) -> Tensor:
        """Return the model's input for x_t (N, H, W, C)."""
        if self.scales_input:
            x_t = x_t / rows.index_select(0, step)[0, INPUT_DIV]
        return x_t.to(self.denoiser.dtype)

    def update(
        self,
        output: Tensor,
        unguided: Tensor | None,
        x_t: Tensor,
        rows: Tensor,
        step: Tensor,
        earlier: tuple[Tensor, ...],
        noise: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if self.options.variance == "fixed":  # ignore a learned variance, as diffusers' DiTPipeline does
            channels = x_t.shape[-1]
            output, unguided = output[..., :channels], None if unguided is None else unguided[..., :channels]
        scale = 1.0 if self.guidance_scale is None else self.guidance_scale
        if unguided is not None and self.guidance_rescale:
            output, unguided = _rescaled(output, unguided, scale, self.guidance_rescale), None
        return denoise_step(
            output, x_t, rows, self.options,
            unguided=unguided, guidance_scale=scale, noise=noise, step=step, earlier=earlier or None,
        )  # fmt: skip


def _rescaled(output: Tensor, unguided: Tensor, scale: float, share: float) -> Tensor:
    """Return the guided output (N, H, W, C) float32, rescaled in part to the deviation of the conditional output.

    `share` is the part, 0 to 1 (Lin et al. 2024, arXiv 2305.08891, section 3.4). Each picture is computed on its own,
    so its bits do not depend on its batch.
    """
    output, unguided = output.float(), unguided.float()
    guided = unguided + scale * (output - unguided)
    spreads = [(each.std(), its_guided.std()) for each, its_guided in zip(output, guided, strict=True)]
    factors = torch.stack([share * (before / after) + (1 - share) for before, after in spreads])
    return guided * factors[:, None, None, None]


@dataclass(frozen=True)
class _Loop:
    """The state shared by all steps, and two ways to take step i: the whole part as a CUDA graph, or by picture.

    Both return x_{t-1} and x0 for `part`, a slice of the N pictures. x_t is (N, H, W, C). The noise is (N, H, W, C),
    the pictures' seeds (N,), or None. With `earlier`, the tensors (N, H, W, C) that earlier steps kept, they also
    return the two tensors that this step keeps.
    """

    denoiser: DenoiserLike
    schedule: Schedule
    conditions: Conditions

    @functools.cached_property
    def table(self) -> ConditioningTable:
        return ConditioningTable(self.denoiser, self.schedule.timesteps, self.conditions)

    @functools.cached_property
    def step(self) -> _Step:
        guidance = self.conditions.guidance
        scale, rescale = (None, 0.0) if guidance is None else (guidance.scale, guidance.rescale)
        return _Step(self.denoiser, self.schedule.options, scale, rescale, self.schedule.scales_input)

    def take_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Take a step: picture by picture on the CPU, as a CUDA graph on a GPU."""
        by_picture = self.denoiser.device.type == "cpu"
        return self.step_by_picture(*args, **kwargs) if by_picture else self.step_as_graph(*args, **kwargs)

    @functools.cached_property
    def step_indices(self) -> Tensor:
        return torch.arange(len(self.schedule), dtype=torch.int32, device=self.denoiser.device)

    @functools.cached_property
    def all_conditions(self) -> Tensor:
        """The conditions of both halves of a guided batch, (2, N), or of an unguided batch, (1, N)."""
        pictures, guidance = self.conditions.of_pictures, self.conditions.guidance
        return pictures[None] if guidance is None else torch.stack([pictures, guidance.null_conditions])

    def step_as_graph(
        self, x_t: Tensor, i: int, noise: Tensor | None, part: slice = ALL, earlier: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Compute all pictures of the part at once."""
        name = tuple(value for key, value in vars(self.step).items() if key != "denoiser")
        run = self.denoiser.graphed(name, self.step)
        conditioning = self.table.at(i).of(self.all_conditions[:, part].flatten())
        kept = tuple(each[part] for each in earlier)
        given = (x_t[part], conditioning, self.schedule.rows, self.step_indices[i : i + 1], kept)
        return run(*given) if noise is None else run(*given, noise[part])

    def step_by_picture(
        self, x_t: Tensor, i: int, noise: Tensor | None, part: slice = ALL, earlier: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Compute each picture on its own.

        A guided picture takes one model call if the denoiser `joins_halves`, else two.
        """
        conditioning = self.table.at(i)
        rows, step = self.schedule.rows, self.step_indices[i : i + 1]

        def predict(x: Tensor, conditions: Tensor) -> Tensor:
            """Return (k, H, W, C_out) from x (1, H, W, C) and one or both of its conditions (1, k)."""
            x = self.step.input(x, rows, step)
            return self.denoiser.predict(x.repeat(conditions.numel(), 1, 1, 1), conditioning.of(conditions[0]))

        x_t, conditions = x_t[part], self.all_conditions[:, part]
        nothing = [None] * len(x_t)
        halves: Iterable[Iterable[Tensor]]
        if self.denoiser.joins_halves:
            halves = zip(*(pair.split(1) for pair in map_in_turn(predict, x_t, conditions.T)), strict=True)
        else:
            halves = (map_pictures(predict, x_t, each[:, None]) for each in conditions)
        outputs, *away = halves
        unguided = away[0] if away else nothing
        noises = nothing if noise is None else noise[part].split(1)
        kept = zip(*(each[part].split(1) for each in earlier), strict=True) if earlier else [()] * len(x_t)
        results = [
            self.step.update(output, null, x, rows, step, its_kept, z)
            for output, null, x, its_kept, z in zip(outputs, unguided, x_t.split(1), kept, noises, strict=True)
        ]
        return tuple(torch.cat(each) for each in zip(*results, strict=True))
