"""The model's conditioning at every step under every condition of a run, made before the steps that need it."""

import torch
from torch import Tensor

from fastdiff.models.denoiser import GROUP, Conditioning, Denoiser, in_groups

# Of a chunk of a table, which holds whole steps. DiT-XL/2 in 16 bits has 0.4 MB for a condition and a step (28 blocks
# of 6 x 1152 numbers), so a chunk holds 64 steps of 10 conditions. The number is chosen, not measured.
TABLE_BYTES = 2**28


class ConditioningTable:
    """The conditioning of every step under every condition, made a chunk of steps at a time."""

    def __init__(self, denoiser: Denoiser, timesteps: Tensor, labels: Tensor | None):
        """timesteps (steps,); labels (conditions, ...), or None for a model that takes none."""
        self._denoiser, self._labels = denoiser, labels
        self._timesteps = timesteps.to(denoiser.device)
        bytes_a_step = denoiser.conditioning_width * denoiser.dtype.itemsize * (1 if labels is None else len(labels))
        fitting = max(1, TABLE_BYTES // bytes_a_step)
        self._chunk = fitting - fitting % GROUP or fitting
        self._made = range(0)  # the steps of the chunk
        self._temb: Tensor | None = None  # (conditions, steps of the chunk, width)

    def at(self, step: int) -> Conditioning:
        """Return that of a step, an entry for each condition."""
        if self._temb is None or step not in self._made:
            first = step - step % self._chunk
            self._made = range(first, min(first + self._chunk, len(self._timesteps)))
            self._temb = None  # before the next chunk takes as much
            self._temb = make_table(self._denoiser, self._timesteps, self._labels, self._made)
        temb = self._temb[:, step - self._made.start]
        return Conditioning(temb, self._timesteps[step].expand(len(temb)))


def make_table(denoiser: Denoiser, timesteps: Tensor, labels: Tensor | None, steps: range) -> Tensor:
    """Return temb (conditions, steps, width) of some `steps` under each of the `labels`, or under none.

    GROUP timesteps of one label at a time, each with a place of its own among them, so that the shape of every product,
    and with it every bit, is the same in any company.
    """
    first = steps.start - steps.start % GROUP
    groups = in_groups(timesteps[first : steps.stop])
    each = [None] if labels is None else [label.expand(GROUP, *label.shape) for label in labels]
    shape = len(each), len(steps), denoiser.conditioning_width
    table = torch.empty(shape, dtype=denoiser.dtype, device=denoiser.device)
    for entry, label in zip(table, each, strict=True):
        made = torch.cat([denoiser.conditioning(group, label).temb for group in groups])
        entry.copy_(made[steps.start - first : steps.stop - first])
    return table
