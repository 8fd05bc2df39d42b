"""The model's conditioning for every step and condition of a run, computed before the steps that need it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fastdiff.diffusion.conditions import Conditions
from fastdiff.execution.replaying.trees import map_tensors
from fastdiff.execution.transfers import upload
from fastdiff.models.blocks.conditioning import GROUP, Conditioning, Given, Prompt, in_groups
from fastdiff.models.blocks.protocols import DenoiserLike

# The size of a chunk of the table. A chunk holds whole steps. DiT-XL/2 in 16 bits needs 0.4 MB per condition and step
# (28 blocks of 6 x 1152 numbers), so a chunk holds 64 steps of 10 conditions. The size is chosen, not measured.
TABLE_BYTES = 2**28


class Entries:
    """The conditions of a batch's pictures, an entry for each picture of each half."""

    def __init__(self, places: Tensor):
        """places: (k,), the index of each entry's condition."""
        self.places = places
        self.temb: tuple[Tensor, Tensor] | None = None  # a chunk of the table, and its rows of these entries


class ConditioningTable:
    """The conditioning for every step and condition.

    The text's part is computed once, the time's part for a chunk of steps at a time.
    """

    def __init__(self, denoiser: DenoiserLike, timesteps: Tensor, conditions: Conditions, *, chunk: int = sys.maxsize):
        """Make a table for timesteps (steps,). Chunks of at most `chunk` steps are computed when they are needed."""
        self._denoiser, self._conditions = denoiser, conditions
        self._timesteps = upload(timesteps, denoiser.device)
        self._float_timesteps = self._timesteps.float()  # some samplers have whole numbers
        bytes_a_step = denoiser.conditioning_width * denoiser.dtype.itemsize * _rows(denoiser, conditions)
        fitting = min(chunk, max(1, TABLE_BYTES // bytes_a_step))
        self._chunk = fitting - fitting % GROUP or fitting
        self._made = range(0)  # the steps of the current chunk
        self._temb: Tensor | None = None  # see `make_table`
        self.text = () if conditions.prompt is None else denoiser.project(conditions.prompt)

    def at(self, step: int) -> Conditioning:
        """Return the conditioning of a step, with one entry per condition."""
        temb, count = self._chunk_with(step)[:, step - self._made.start], len(self._conditions)
        return Conditioning(temb.expand(count, -1), self._timesteps[step].expand(count), self.text)

    def of(self, step: int, entries: Entries, most: int = 1) -> tuple[Tensor, Tensor]:
        """Return temb (k, n, width) and the timesteps (k, n) float32 of n steps from `step` on, at most `most`.

        They may be views of a table. If there are no more entries than conditions, the entries' rows are gathered once
        for a chunk of steps.
        """
        chunk, count = self._chunk_with(step), len(entries.places)
        steps = slice(step - self._made.start, min(step + most, self._made.stop) - self._made.start)
        timesteps = self._float_timesteps[self._made.start :][steps].expand(count, -1)
        if len(chunk) == 1:
            return chunk[:, steps].expand(count, -1, -1), timesteps
        if count > len(chunk):
            return chunk[:, steps][entries.places], timesteps
        if entries.temb is None or entries.temb[0] is not chunk:
            entries.temb = chunk, chunk[entries.places]
        return entries.temb[1][:, steps], timesteps

    def _chunk_with(self, step: int) -> Tensor:
        """Return the chunk that has a step; see `make_table`."""
        if self._temb is None or step not in self._made:
            first = step - step % self._chunk
            self._made = range(first, min(first + self._chunk, len(self._timesteps)))
            self._temb = None  # free this chunk before allocating the next
            self._temb = make_table(self._denoiser, self._timesteps, self._conditions, self._made)
        return self._temb


def make_table(denoiser: DenoiserLike, timesteps: Tensor, conditions: Conditions, steps: range) -> Tensor:
    """Return temb (conditions, steps, width) for `steps`, or (1, steps, width) if it is equal for all conditions.

    The model embeds GROUP timesteps of one condition at a time, and a timestep always has the same position in its
    group. So all matrix products have the same shape, and the bits do not depend on the other conditions and steps.
    """
    first = steps.start - steps.start % GROUP
    groups = in_groups(timesteps[first : steps.stop])
    shape = _rows(denoiser, conditions), len(steps), denoiser.conditioning_width
    table = torch.empty(shape, dtype=denoiser.dtype, device=denoiser.device)
    embed: Callable[..., Tensor] = partial(_embedded, denoiser)
    if denoiser.device.type == "cuda":
        embed = denoiser.graphed("embed", embed)
    told = conditions if denoiser.embeds_prompt else replace(conditions, prompt=None)
    for i, row in enumerate(table):
        labels, prompts = (
            () if each is None else (map_tensors(partial(_repeated, entry=i), each),)
            for each in (told.labels, told.prompt)
        )
        made = torch.cat([embed(group, labels, prompts) for group in groups])
        row.copy_(made[steps.start - first : steps.stop - first])
    return table


def _rows(denoiser: DenoiserLike, conditions: Conditions) -> int:
    """Return the number of rows of a table: 1 if `embed` reads nothing of the conditions."""
    return len(conditions) if denoiser.embeds_prompt or conditions.labels is not None else 1


def _embedded(denoiser: DenoiserLike, timesteps: Tensor, labels: Given, prompts: tuple[Prompt, ...]) -> Tensor:
    """Return `embed` as a function of tensors only."""
    return denoiser.embed(timesteps, labels[0] if labels else None, prompts[0] if prompts else None)


def _repeated(tensor: Tensor, entry: int) -> Tensor:
    """Return one entry (...) of a tensor (M, ...) for each timestep of a group: (GROUP, ...)."""
    return tensor[entry].expand(GROUP, *tensor.shape[1:])
