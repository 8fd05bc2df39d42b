"""Conditioning: everything that a prediction depends on besides x, and the Prompt that its text comes from.

The sampling loop makes a Conditioning before its first step and selects entries from it at each step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff.execution.replaying.trees import map_tensors

# Timesteps are embedded in groups of this size, padded if there are fewer. With products of one shape, the bits of a
# timestep do not depend on the others. 32 is the largest batch of the benchmarks, so this costs them nothing (68ecf61).
GROUP = 32

Given = tuple[Tensor, ...]  # optional tensors; () for none, because a CUDA graph takes no None


class Prompt(NamedTuple):
    """The text and its companions. Each tensor has one entry per picture, or per condition."""

    text: Tensor  # (M, L, text_width): encoder_hidden_states
    bias: Given = ()  # (M, L), from encoder_attention_mask
    added: Given = ()  # added_cond_kwargs: text_embeds (M, width) and time_ids (M, count)
    timestep_cond: Given = ()  # (M, time_cond_proj_dim)
    images: Given = ()  # (M, tokens, width) for each IP-Adapter: keys and values of pictures for all attentions


class Conditioning(NamedTuple):
    """Everything that a prediction depends on besides x. Each tensor has one entry per picture, or per condition.

    It is one value that is made, indexed and passed through CUDA graphs as a whole. Every input of a model other than x
    is a field here.
    """

    temb: Tensor  # (M, width): what the blocks read of time and class, side by side
    timesteps: Tensor  # (M,)
    text: tuple[Tensor, ...] = ()  # (M, L, width): keys and values of a text, of image prompts; (M, L): a bias of keys

    def of(self, conditions: Tensor) -> "Conditioning":
        """Return the entries at the indices `conditions` (N,), in this order."""
        return map_tensors(lambda tensor: tensor[conditions], self)


def in_groups(x: Tensor) -> tuple[Tensor, ...]:
    """Split x (M, ...) into parts of GROUP entries. The last part is padded with the last entry."""
    return torch.cat([x, x[-1:].expand(-len(x) % GROUP, *x.shape[1:])]).split(GROUP)
