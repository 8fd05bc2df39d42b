"""Conditioning: all that a prediction depends on besides x, and the Prompt that a part of it is made of.

The sampling loop makes a Conditioning before it begins and chooses from it at each step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff.execution.cuda_graphs import map_tensors

# Timesteps that are embedded together, filled up where there are fewer: a product of one shape gives each the same bits
# in any company. 32 is the largest batch of the benchmarks, so that this costs them nothing (68ecf61).
GROUP = 32

Given = tuple[Tensor, ...]  # one, or none: a graph's inputs are tensors and tuples of them


class Prompt(NamedTuple):
    """The text and what goes with it, an entry of each tensor for each picture, or for each condition."""

    text: Tensor  # (M, L, text_width): encoder_hidden_states
    bias: Given = ()  # (M, L), of encoder_attention_mask
    added: Given = ()  # (M, projection_class_embeddings_input_dim): added_cond_kwargs as one, before its embedding
    timestep_cond: Given = ()  # (M, time_cond_proj_dim)


class Conditioning(NamedTuple):
    """All that a prediction depends on besides x: an entry of each tensor for each picture, or for each condition.

    It is made, chosen from and carried as one value, through CUDA graphs too. Whatever else a model is told is a field
    here.
    """

    temb: Tensor  # (M, width): what the blocks read of time and class, side by side
    timesteps: Tensor  # (M,)
    text: tuple[Tensor, ...] = ()  # (M, L, width): keys and values of a text, side by side; (M, L): a bias of its keys

    def of(self, conditions: Tensor) -> "Conditioning":
        """Return the entries with these indices (N,), in this order."""
        return map_tensors(lambda tensor: tensor[conditions], self)


def in_groups(x: Tensor) -> tuple[Tensor, ...]:
    """Return x (M, ...) in parts of GROUP entries; the last part is filled up with the last entry."""
    return torch.cat([x, x[-1:].expand(-len(x) % GROUP, *x.shape[1:])]).split(GROUP)
