"""The attentions of a text U-Net outside transformers: in Attn, SimpleCrossAttn and K blocks.

The keys and values of the text are columns of one tensor, which the model makes once per prompt, as in
`transformer.py`. Each attention here has its own projections of the text: they have biases and may normalise the text.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from fastdiff.kernels.attention import attention
from fastdiff.kernels.linear import linear
from fastdiff.models.blocks.attention import Attention, project_out
from fastdiff.models.blocks.embeddings import normed
from fastdiff.models.blocks.layers import Feature, GroupNorm
from fastdiff.models.blocks.resnet import AdaGroupNorm, BlockOptions, Conditioned
from fastdiff.models.blocks.transformer import Context

EPS = 1e-5  # of the norms; fixed in diffusers
TEXT_GROUPS = 32  # of a GroupNorm of the text; fixed in diffusers


class PlainAttention(Attention):
    """Self-attention of the pixels in AttnDownBlock2D and AttnUpBlock2D, which reads no text."""

    def forward(self, x: Feature, context: Context) -> Feature:  # type: ignore[override]  # as the others are called
        return super().forward(x)


class TextReader(nn.Module):
    """An attention with its own projections of the text to keys and values."""

    columns: slice  # set by the model: the keys, then the values
    norm_cross: nn.Module | None

    @property
    def readers(self) -> tuple[nn.Linear, nn.Linear]:
        """The projections to keys and to values."""
        raise NotImplementedError

    def project(self, text: Tensor) -> Tensor:
        """Return keys and values side by side: (M, L, text_width) -> (M, L, 2 * width)."""
        if isinstance(self.norm_cross, nn.LayerNorm):
            text = normed(text, self.norm_cross)
        elif self.norm_cross is not None:
            text = self.norm_cross(Feature(text[:, :, None])).x[:, :, 0]
        return torch.cat([linear(text, layer.weight, layer.bias) for layer in self.readers], dim=-1)

    def of_text(self, context: Context) -> tuple[Tensor, ...]:
        """Return the keys and the values of the text."""
        return context.text[..., self.columns].chunk(2, dim=-1)


class AddedAttention(TextReader):
    """Attention of the pixels to the text and to one another; diffusers' Attention with AttnAddedKVProcessor."""

    def __init__(
        self, channels: int, head_dim: int, text_width: int, groups: int, *, only_cross: bool, cross_norm: str | None
    ):
        super().__init__()
        self.heads = channels // head_dim
        self.group_norm = GroupNorm(groups, channels, eps=EPS)
        self.norm_cross = None
        if cross_norm is not None:
            is_layer_norm = cross_norm == "layer_norm"
            self.norm_cross = nn.LayerNorm(text_width) if is_layer_norm else GroupNorm(TEXT_GROUPS, text_width, eps=EPS)
        self.to_q = nn.Linear(channels, channels) if only_cross else None
        self.to_qkv = None if only_cross else nn.Linear(channels, 3 * channels)
        self.add_k_proj, self.add_v_proj = (nn.Linear(text_width, channels) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    @property
    def readers(self) -> tuple[nn.Linear, nn.Linear]:
        return self.add_k_proj, self.add_v_proj

    def forward(self, x: Feature, context: Context) -> Feature:
        h = self.group_norm(x).x.flatten(1, 2)
        keys, values = self.of_text(context)
        bias = context.text_bias if context.bias is None else context.bias
        if self.to_q is not None:
            q = linear(h, self.to_q.weight, self.to_q.bias)
        else:
            to_qkv = cast(nn.Linear, self.to_qkv)
            q, k, v = linear(h, to_qkv.weight, to_qkv.bias).chunk(3, dim=-1)
            keys, values = torch.cat([keys, k], dim=1), torch.cat([values, v], dim=1)
            bias = None if bias is None else torch.cat([bias, bias.new_zeros(k.shape[:2])], dim=1)
        return project_out(attention(q, keys, values, heads=self.heads, bias=bias), self.to_out, x)


class _KSelfAttention(nn.Module):
    """Self-attention of the pixels; attn1 of diffusers' KAttentionBlock."""

    def __init__(self, channels: int, heads: int, width: int):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(channels, 3 * width)
        self.to_out = nn.ModuleList([nn.Linear(width, channels)])

    def forward(self, h: Feature, x: Feature, context: Context) -> Feature:
        """Return x plus the attention of its norm h."""
        qkv = linear(h.x.flatten(1, 2), self.to_qkv.weight, self.to_qkv.bias)
        return project_out(attention(*qkv.chunk(3, dim=-1), heads=self.heads, bias=context.bias), self.to_out, x)


class _KTextAttention(TextReader):
    """Cross-attention to the text; attn2 of diffusers' KAttentionBlock."""

    def __init__(self, channels: int, heads: int, width: int, text_width: int):
        super().__init__()
        self.heads = heads
        self.norm_cross = nn.LayerNorm(text_width)
        self.to_q = nn.Linear(channels, width)
        self.to_k, self.to_v = (nn.Linear(text_width, width) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(width, channels)])

    @property
    def readers(self) -> tuple[nn.Linear, nn.Linear]:
        return self.to_k, self.to_v

    def forward(self, h: Feature, x: Feature, context: Context) -> Feature:
        """Return x plus the attention of its norm h."""
        q = linear(h.x.flatten(1, 2), self.to_q.weight, self.to_q.bias)
        tokens = attention(q, *self.of_text(context), heads=self.heads, bias=context.text_bias)
        return project_out(tokens, self.to_out, x)


class KAttention(Conditioned):
    """Attention to the pixels, if any, then to the text, with norms that read time; diffusers' KAttentionBlock."""

    raw = True

    def __init__(
        self, channels: int, head_dim: int, text_width: int, group_size: int, options: BlockOptions, *, of_pixels: bool
    ):
        super().__init__()
        heads, groups = channels // head_dim, max(1, channels // group_size)
        plain = replace(options, activation="none", eps=EPS)
        names = ("norm1", "norm2") if of_pixels else ("norm2",)
        self.projections = {f"{name}.linear": 2 * channels for name in names}
        self.norm1 = AdaGroupNorm(channels, groups, plain) if of_pixels else None
        self.attn1 = _KSelfAttention(channels, heads, heads * head_dim) if of_pixels else None
        self.norm2 = AdaGroupNorm(channels, groups, plain)
        self.attn2 = _KTextAttention(channels, heads, heads * head_dim, text_width)

    def forward(self, x: Feature, context: Context) -> Feature:
        *first, last = context.temb[:, self.columns].split(list(self.projections.values()), dim=1)
        if self.norm1 is not None and self.attn1 is not None:
            x = self.attn1(self.norm1(x, first[0]), x, context)
        return self.attn2(self.norm2(x, last), x, context)
