"""Runs whose prompts change from step to step, or have different numbers of chunks.

Pictures with as many chunks form a group, which runs as it would alone: filling prompts up to the longest one of the
batch would change their bits. All texts are encoded before the first step.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.diffusion.conditions import Conditions
from fastdiff.diffusion.loop import AfterStep, denoise
from fastdiff.errors import InputError
from fastdiff.execution.devices import naming_lost_device
from fastdiff.models.blocks.protocols import DenoiserLike
from fastdiff.pipelines.controlling import ControlRun
from fastdiff.pipelines.drawing import Drawing, Started
from fastdiff.samplers.shared.noise import NoiseSource

# Called with the index of a step and x_{t-1} (N, H, W, C) of all pictures. It returns the x_{t-1} that the next step
# starts from, and new conditions of each group, or None to keep them
AfterGroups = Callable[[int, Tensor], tuple[Tensor, Sequence[Conditions] | None]]
Changes = dict[int, tuple[Tensor, Conditions | None]]  # the place of a group -> what its next step starts from


class Group(NamedTuple):
    """Pictures that run together."""

    rows: list[int]  # their places in the batch
    of_steps: Sequence[Conditions]  # one for each model call, or one alone; the same object where nothing changes

    @property
    def after_step(self) -> AfterStep | None:
        """The change of the conditions after a step; None if they never change."""
        if all(each is self.of_steps[0] for each in self.of_steps):
            return None

        def change(step: int, x: Tensor) -> tuple[Tensor, Conditions | None]:
            now, following = self.of_steps[step], self.of_steps[min(step + 1, len(self.of_steps) - 1)]
            return x, None if following is now else following

        return change


def groups_of(
    counts: Sequence[Any], steps: int, make: Callable[[list[int], int], Conditions], key: Callable[[int], object]
) -> list[Group]:
    """Return the groups of a batch.

    Args:
        counts: the number of chunks of each picture, or several numbers. Pictures with equal ones form a group.
        steps: the number of model calls that the texts may change at; 1 if they never change.
        make: returns the conditions of these pictures at a model call.
        key: says what all texts are at a model call. Calls of one key share their conditions.
    """
    groups = []
    for count in sorted(set(counts)):
        rows = [i for i, each in enumerate(counts) if each == count]
        made: dict[object, Conditions] = {}
        of_steps = []
        for step in range(steps):
            told = key(step)
            if told not in made:
                made[told] = make(rows, step)
            of_steps.append(made[told])
        groups.append(Group(rows, of_steps))
    return groups


def check_groups(groups: Sequence[Group], callback: object, *, masks: bool) -> None:
    """Raise InputError for a callback, or masks, that the groups cannot follow."""
    changes = any(group.after_step is not None for group in groups)
    if callback is not None and (changes or len(groups) > 1):
        raise InputError("callback_on_step_end: a prompt changes, or is longer than others; leave it out")
    if masks and len(groups) > 1:
        raise InputError("mask_image: a prompt is longer than others; draw prompts of other lengths in other calls")


def denoise_groups(
    drawing: Drawing,
    denoiser: DenoiserLike,
    groups: Sequence[Group],
    after_step: AfterStep | None,
    control: ControlRun | None = None,
    begun: Callable[[Started], None] | None = None,
    after_groups: AfterGroups | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Return an iterator over the index of a step, x_{t-1} and x0, each (N, H, W, C) float32.

    `after_step` and `begun` are for a single group, `after_groups` for any number.
    """
    if len(groups) == 1 and after_groups is None:
        first = groups[0].of_steps[0]
        return drawing.denoise(denoiser, first, control=control, after_step=after_step, begun=begun)
    return _in_turn(drawing, denoiser, groups, control, after_groups)


def _in_turn(
    drawing: Drawing,
    denoiser: DenoiserLike,
    groups: Sequence[Group],
    control: ControlRun | None,
    after_groups: AfterGroups | None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield a step when all groups have taken it."""
    started = drawing.start()
    starts = [started if len(groups) == 1 else started.of_rows(group.rows) for group in groups]
    with naming_lost_device():
        noise = drawing.noise.of_steps(drawing.schedule.noise_dtype)
    changes: Changes = {}
    runs = [
        denoise(
            denoiser,
            start.x_t,
            drawing.schedule,
            group.of_steps[0],
            noise=source,
            portions=drawing.portions,
            known=start.known,
            inputs=start.inputs,
            control=None if control is None else control.of_rows(group.rows),
            after_step=group.after_step,
            before_step=partial(_taken, changes, place),
        )
        for place, (group, start, source) in enumerate(zip(groups, starts, _sources(noise, groups), strict=True))
    ]
    order = torch.tensor([row for group in groups for row in group.rows]).argsort().to(started.x_t.device)
    for results in zip(*runs, strict=True):
        (step, *_), *states = zip(*results, strict=True)
        x_t, x0 = (torch.cat(each)[order] for each in states)
        if after_groups is not None:
            x_t, conditions = after_groups(step, x_t)
            told = [None] * len(groups) if conditions is None else conditions
            changes |= {place: (x_t[group.rows], told[place]) for place, group in enumerate(groups)}
        yield step, x_t, x0


def _taken(changes: Changes, place: int, step: int) -> tuple[Tensor | None, Conditions | None]:
    return changes.pop(place, (None, None))


def _sources(noise: NoiseSource, groups: Sequence[Group]) -> list[NoiseSource]:
    """Return each group's part of the noise. The first group draws for all of them."""
    if isinstance(noise, Tensor):
        return [noise[group.rows] for group in groups]
    drawn: list[Tensor] = []

    def source(group: Group) -> Callable[[], Tensor]:
        def draw() -> Tensor:
            if group is groups[0]:
                drawn[:] = [noise()]
            return drawn[0][group.rows]

        return draw

    return [source(group) for group in groups]
