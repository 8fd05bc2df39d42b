"""The denoising loop: x_t -> x_{t-1}, one row of the schedule at a time, with pictures independent of their batch.

The same seed gives the same bits alone, in any batch and at any position in it. torch's batched convolutions on the CPU
do not keep that promise, so the CPU path computes each picture on its own, with a fixed number of threads.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.diffusion.conditioning import ConditioningTable, Entries
from fastdiff.diffusion.conditions import Conditions
from fastdiff.diffusion.shared_steps import ROWS, AskedStep, Constants, FixedInputs, Moments, done, sharing
from fastdiff.diffusion.step import Step, with_inputs
from fastdiff.execution.cpu_workers import map_in_turn, map_pictures
from fastdiff.execution.memory import Portions
from fastdiff.execution.replaying.trees import Fixed, map_tensors
from fastdiff.kernels.denoise import EARLIER
from fastdiff.kernels.scale_input import scale_input
from fastdiff.models.blocks.protocols import DenoiserLike
from fastdiff.samplers.shared.noise import NoiseSource
from fastdiff.samplers.shared.schedule import Schedule

# Called with the index of a step and x_{t-1}; see `denoise`
AfterStep = Callable[[int, Tensor], tuple[Tensor, Conditions | None]]
BeforeStep = Callable[[int], tuple[Tensor | None, Conditions | None]]

ALL = slice(None)


class Known(Protocol):
    """The parts of a run's result that are known before it."""

    def begin(self, x_t: Tensor) -> Tensor:
        """Return x_t (N, H, W, C) of the first step. The caller may own the given one."""
        ...

    def set_after(self, step: int, x: Tensor) -> None:
        """Set the known parts in x_{t-1} (N, H, W, C) of a step, in place and without a sync."""
        ...


@dataclass(frozen=True, eq=False)
class Controlled:
    """A denoiser with the models that control a step, such as ControlNets, and the inputs of these models."""

    denoiser: DenoiserLike
    pictures: tuple[Tensor, ...]  # for each of the models, (N, H, W, C)
    others: tuple[Any, ...]  # for each of the models, tensors that all pictures share
    conditional_alone: bool  # whether the models leave the unconditional half as it is
    name: Hashable = None  # equal for runs of the same models that share `others`; None: no run shares them

    @property
    def key(self) -> Hashable:
        """Return what runs have in common whose control can be joined."""
        sizes = tuple(each.shape[1:] for each in self.pictures)
        return id(self) if self.name is None else (self.name, sizes, self.conditional_alone)

    def inputs(self, part: slice, halves: int) -> tuple[Any, ...]:
        """Return what `predict` takes after the conditioning, for a part of the pictures."""
        count = 1 if self.conditional_alone else halves
        pictures = [each[part].repeat(count, 1, 1, 1) for each in self.pictures]
        return tuple(zip(pictures, self.others, strict=True))


class Control(Protocol):
    """Says what controls each step of a run."""

    def at(self, step: int) -> Controlled | None:
        """Return what controls a step: the same object for alike steps, and None for nothing."""
        ...


def denoise(
    denoiser: DenoiserLike,
    x_t: Tensor,
    schedule: Schedule,
    conditions: Conditions,
    *,
    noise: NoiseSource,
    portions: Portions,
    known: Known | None = None,
    inputs: Tensor | None = None,
    control: Control | None = None,
    after_step: AfterStep | None = None,
    before_step: BeforeStep | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the index of a step, x_{t-1} and x0, each (N, H, W, C) float32, after every step.

    If nobody looks at the steps (`Share.each_step`), only the last of consecutive alike steps is yielded.

    Args:
        x_t: The starting noise, (N, H, W, C) float32 on the model's device, scaled by the schedule's init_noise_sigma.
        schedule: The steps, with rows on the model's device.
        conditions: The conditions of the N pictures, on the model's device.
        noise: The source of the steps' noise.
        portions: How many of the N pictures are computed together. If a portion does not fit in memory, it is computed
            again in smaller portions, and earlier steps stay valid.
        known: What is known of the result, such as values of trajectories or the pixels that inpainting keeps. It is
            set in x_t before the first step and after every step. x0 stays the model's prediction.
        inputs: The input channels of an inpainting model after x_t, the same at each step, (N, H, W, C') in the model's
            dtype.
        control: What controls the steps. A step without control runs the denoiser alone.
        after_step: Called with the index of a step and x_{t-1}. It returns the x_{t-1} that the next step starts from,
            and new conditions or None to keep them.
        before_step: Called with the index of a step. It returns the step's x_t and conditions; None keeps each.

    Raises OutOfMemoryError.
    """
    seeds = noise if isinstance(noise, Tensor) else None
    weights, loops = denoiser.weights_state, dict[tuple, Loop]()  # by whether a step is guided, and what controls it
    if known is not None:
        x_t = known.begin(x_t)
    kept = x_t.new_zeros(len(x_t), EARLIER, *x_t.shape[1:]) if schedule.multistep else None
    share = sharing.get()
    is_looked_at = share is None or share.each_step
    unwatched = seeds is not None and not is_looked_at and known is before_step is after_step is None
    i, count = 0, len(schedule)
    while i < count:
        if before_step is not None:
            given_x, changed = before_step(i)
            x_t = x_t if given_x is None else given_x
            if changed is not None:
                conditions = changed
                loops.clear()
        if weights != denoiser.weights_state:  # adapters have changed what was computed before the loop
            weights = denoiser.weights_state
            loops.clear()
        guided, controlled = alike = _kind_of_step(i, count, conditions, control)
        if alike not in loops:
            given = conditions if guided else replace(conditions, guidance=None)
            model = denoiser if controlled is None else controlled.denoiser
            loops[alike] = Loop(model, schedule, given, seeds, inputs, controlled)
        stop = i + 1
        while unwatched and stop < count and _kind_of_step(stop, count, conditions, control) == alike:
            stop += 1
        z = noise() if schedule.draws_noise[i] and not isinstance(noise, Tensor) else None
        take = functools.partial(loops[alike].take_steps, x_t, i, stop, z, earlier=kept)
        x_t, x0, *earlier = _join(portions.map(take, len(x_t)))
        kept, i = earlier[0] if earlier else None, stop
        if known is not None:
            known.set_after(i - 1, x_t)
        if after_step is not None:
            x_t, changed = after_step(i - 1, x_t)
            if changed is not None:
                conditions = changed
                loops.clear()
        yield i - 1, x_t, x0


def _kind_of_step(
    i: int, count: int, conditions: Conditions, control: Control | None
) -> tuple[bool, Controlled | None]:
    """Return whether step i of `count` is guided, and what controls it."""
    return conditions.guides(i, count), None if control is None else control.at(i)


def _join(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    if len(parts) == 1:  # no copy
        return parts[0]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


@dataclass(frozen=True)
class Loop:
    """The state shared by all guided steps, or by all others.

    There are two ways to take step i: the whole part as a CUDA graph, or by picture.

    Both return x_{t-1} and x0 for `part`, a slice of the N pictures. x_t is (N, H, W, C). `noise` is (N, H, W, C), or
    None if the step draws none or the noise comes from `seeds`. With `earlier` (N, EARLIER, H, W, C), which earlier
    steps kept, they also return the next step's.
    """

    denoiser: DenoiserLike
    schedule: Schedule
    conditions: Conditions
    seeds: Tensor | None  # (N,) int64, on the model's device; None if a generator draws the noise
    inputs: Tensor | None = None  # see `denoise`
    control: Controlled | None = None

    @functools.cached_property
    def table(self) -> ConditioningTable:
        return ConditioningTable(self.denoiser, self.schedule.timesteps, self.conditions)

    @functools.cached_property
    def step(self) -> Step:
        guidance = self.conditions.guidance
        rescale, most = (0.0, 0.0) if guidance is None else (guidance.rescale, guidance.most_norm)
        return Step(self.denoiser, self.schedule.options, guidance is not None, rescale, most)

    def take_steps(
        self, x_t: Tensor, i: int, stop: int, noise: Tensor | None, part: slice = ALL, earlier: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Take the steps from i up to `stop`, alone or with other runs: see `shared_steps`.

        Returns what the last one returns. More than one step need `seeds`.
        """
        return done(AskedStep(self, x_t, i, stop, noise, part, earlier, self.denoiser.weights_state))

    def key(self, x_t: Tensor, earlier: Tensor | None) -> tuple[Any, ...]:
        """Return what steps that are taken together have in common: all that changes shapes or launches.

        Steps with ControlNets are shared if the ControlNets, their scales and the sizes of their pictures are equal.
        Generators draw the noise outside of the step.
        """
        return (*self._key, x_t.shape[1:], earlier is None)

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        shapes: list[Any] = []
        map_tensors(lambda each: shapes.append((each.shape[1:], each.dtype)), self.table.text)
        inputs = None if self.inputs is None else self.inputs.shape[1:]
        model, control = (id(self.denoiser), None) if self.control is None else (None, self.control.key)
        return (
            model, control, self.step.name, tuple(shapes), inputs,
            self.draws_outside, -(-len(self.schedule) // ROWS),
        )  # fmt: skip

    def step_alone(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Take a step: picture by picture on the CPU, as a CUDA graph on a GPU."""
        by_picture = self.denoiser.device.type == "cpu"
        return self.step_by_picture(*args, **kwargs) if by_picture else self.step_as_graph(*args, **kwargs)

    @functools.cached_property
    def step_indices(self) -> Tensor:
        """The row of each picture at each step, (N, steps) int32."""
        indices = torch.arange(len(self.schedule), dtype=torch.int32, device=self.denoiser.device)
        return indices.repeat(len(self.conditions.of_pictures), 1)

    @functools.cached_property
    def all_conditions(self) -> Tensor:
        """The conditions of both halves of a guided batch, (2, N), or of an unguided batch, (1, N)."""
        pictures, guidance = self.conditions.of_pictures, self.conditions.guidance
        return pictures[None] if guidance is None else torch.stack([pictures, guidance.null_conditions])

    @property
    def halves(self) -> int:
        """2 for a guided batch, whose model call computes both halves; otherwise 1."""
        return len(self.all_conditions)

    @functools.cached_property
    def guidance_scale(self) -> Tensor:
        """(N,) float32."""
        guidance = self.conditions.guidance
        return torch.full_like(
            self.conditions.of_pictures, 1.0 if guidance is None else guidance.scale, dtype=torch.float32
        )

    def _entries(self, part: slice) -> Entries:
        key = part.start, part.stop
        if key not in self._entries_of_parts:
            self._entries_of_parts[key] = Entries(self.all_conditions[:, part].flatten())
        return self._entries_of_parts[key]

    @functools.cached_property
    def _entries_of_parts(self) -> dict[tuple[int, int], Entries]:
        return {}

    @functools.cached_property
    def _fixed_of_parts(self) -> dict[tuple[int, int], FixedInputs]:
        return {}

    def fixed(self, part: slice, x_t: Tensor) -> FixedInputs:
        """Return the inputs of the graph that stay the same, for a part of the pictures."""
        key = part.start, part.stop
        if key not in self._fixed_of_parts:
            rows = F.pad(self.schedule.rows, (0, 0, 0, -len(self.schedule) % ROWS))
            entries = self._entries(part).places
            text = map_tensors(lambda each: each[entries], self.table.text)
            inputs = () if self.inputs is None else (self.inputs[part].repeat(self.halves, 1, 1, 1),)
            constants = Constants(rows, self.guidance_scale[part], text, inputs, self._controls(part))
            x_t = x_t[part]
            seeds = x_t.new_zeros(len(x_t), dtype=torch.int64) if self.seeds is None else self.seeds[part]
            zeros = x_t.new_zeros(len(x_t), EARLIER, *x_t.shape[1:])
            self._fixed_of_parts[key] = FixedInputs(Fixed(constants), Fixed(seeds), Fixed(zeros))
        return self._fixed_of_parts[key]

    def moments(self, i: int, part: slice, most: int) -> Moments:
        """Return the moments of at most `most` steps from step i on, for a part of the pictures."""
        temb, timesteps = self.table.of(i, self._entries(part), most)
        return Moments(self.step_indices[part, i : i + timesteps.shape[1]], temb, timesteps)

    @functools.cached_property
    def draws_outside(self) -> bool:
        """Whether a generator draws the noise of some step."""
        return self.seeds is None and any(self.schedule.draws_noise)

    def drawn(self, x_t: Tensor, noise: Tensor | None, part: slice) -> Tensor:
        """Return a step's noise from a generator, for a part of the pictures; zeros for a step without noise."""
        return torch.zeros_like(x_t[part]) if noise is None else noise[part]

    def _controls(self, part: slice) -> tuple[Any, ...]:
        return () if self.control is None else self.control.inputs(part, self.halves)

    def step_as_graph(
        self, x_t: Tensor, i: int, noise: Tensor | None, part: slice = ALL, earlier: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Compute all pictures of the part at once. One graph runs every sampler, any number of steps and any scale."""
        constants, seeds, zeros = self.fixed(part, x_t)
        z = self.drawn(x_t, noise, part) if self.draws_outside else seeds
        step, *time = (each[:, 0].contiguous() for each in self.moments(i, part, 1))  # kernels read no views
        state, wanted = (zeros, (0, 1)) if earlier is None else (earlier[part], (0, 1, 2))
        return self.graph()(x_t[part], step, tuple(time), state, constants, z, wanted=wanted)

    def graph(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return the step as a graph."""
        return self.denoiser.graphed(self.step.name, self.step)

    def step_by_picture(
        self, x_t: Tensor, i: int, noise: Tensor | None, part: slice = ALL, earlier: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Compute each picture on its own.

        A guided picture takes one model call if the denoiser `joins_halves`, else two.
        """
        conditioning = self.table.at(i)
        rows, step = self.schedule.rows, self.step_indices[:1, i]
        model = self.denoiser.graphed("predict", self.denoiser.predict)

        def predict(x: Tensor, conditions: Tensor, place: Tensor, *inputs: Tensor) -> Tensor:
            """Return (k, H, W, C_out) from x (1, H, W, C), one or both of its conditions (1, k), and its place (1,)."""
            x = scale_input(x, rows, step, self.denoiser.dtype, conditions.numel())
            control = self._controls(slice(int(place), int(place) + 1))
            return model(with_inputs(x, *inputs), conditioning.of(conditions[0]), *control)

        places = torch.arange(len(x_t))[part]
        x_t, conditions = x_t[part], self.all_conditions[:, part]
        inputs = () if self.inputs is None else (self.inputs[part],)
        nothing = [None] * len(x_t)
        halves: Iterable[Iterable[Tensor]]
        if self.denoiser.joins_halves:
            halves = zip(
                *(pair.split(1) for pair in map_in_turn(predict, x_t, conditions.T, places, *inputs)), strict=True
            )
        else:
            halves = (map_pictures(predict, x_t, each[:, None], places, *inputs) for each in conditions)
        outputs, *away = halves
        unguided = away[0] if away else nothing
        noise = self.seeds if self.schedule.draws_noise[i] and self.seeds is not None else noise
        noises = nothing if noise is None else noise[part].split(1)
        kept = nothing if earlier is None else earlier[part].split(1)
        scales = self.guidance_scale[part].split(1)
        results = [
            self.step.update(output, null, x, rows, step, its_kept, z, scale)
            for output, null, x, its_kept, z, scale in zip(
                outputs, unguided, x_t.split(1), kept, noises, scales, strict=True
            )
        ]
        return tuple(torch.cat(each) for each in zip(*results, strict=True))
