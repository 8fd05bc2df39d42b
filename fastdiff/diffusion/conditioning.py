"""The conditioning of every step, made before the steps that need it; and guidance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.models.denoiser import ROWS, Conditioning, Denoiser, in_rows

TABLE_BYTES = 2**28  # of a chunk of a table: a row of DiT-XL/2 has 0.4 MB in 16 bits


class Table:
    """The conditioning of every step under every label, made before the steps that need it, a chunk at a time."""

    def __init__(self, denoiser: Denoiser, timesteps: Tensor, labels: Tensor | None):
        """timesteps (steps,); labels (rows, ...), or None for a model that takes none."""
        self._denoiser, self._labels = denoiser, labels
        self._timesteps = timesteps.to(denoiser.device)
        bytes_a_step = denoiser.conditioning_width * denoiser.dtype.itemsize * (1 if labels is None else len(labels))
        fitting = max(1, TABLE_BYTES // bytes_a_step)
        self._chunk = fitting - fitting % ROWS or fitting
        self._made, self._temb = range(0), None

    def at(self, step: int) -> Conditioning:
        """That of a step, a row for each label."""
        if step not in self._made:
            first = step - step % self._chunk
            self._made, self._temb = range(first, min(first + self._chunk, len(self._timesteps))), None
            self._temb = make_table(self._denoiser, self._timesteps, self._labels, self._made)
        temb = self._temb[:, step - self._made.start]
        return Conditioning(temb, self._timesteps[step].expand(len(temb)))


def make_table(denoiser: Denoiser, timesteps: Tensor, labels: Tensor | None, steps: range) -> Tensor:
    """(labels, steps, width): embeddings and projections for some `steps` under each of the `labels`, or under none.

    ROWS timesteps of one label at a time, each with a place of its own among them, so that the shape of every product,
    and with it every bit, is the same in any company.
    """
    first = steps.start - steps.start % ROWS
    groups = in_rows(timesteps[first : steps.stop])
    each = [None] if labels is None else [label.expand(ROWS, *label.shape) for label in labels]
    shape = len(each), len(steps), denoiser.conditioning_width
    table = torch.empty(shape, dtype=denoiser.dtype, device=denoiser.device)
    for rows, label in zip(table, each, strict=True):
        made = torch.cat([denoiser.conditioning(group, label).temb for group in groups])
        rows.copy_(made[steps.start - first : steps.stop - first])
    return table


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance, Ho and Salimans 2022 (arXiv 2207.12598)."""

    scale: float
    null_row: int  # of the table
