"""The transformers of a text U-Net: pixels attend to one another and to a text.

Tokens are (N, L, C), the pixels of a picture row by row, so the output of a GroupNorm over (N, H, W, C) is viewed as
tokens without a copy. A block's first two residual sums are fused into the norms after them, and its third sum into the
last product. The keys and values of the text are columns of one tensor, which the model makes once per prompt: see
TextAttention.
"""

from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import conv2d
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host.weights import FP8, Scaled
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.models.blocks.layers import Feature, GroupNorm, as_feature

EPS = 1e-6  # of the norm before a transformer; fixed in diffusers
MLP = 4  # the inner width of the MLP is this many times the width


class Context(NamedTuple):
    """Everything that the blocks read besides the pictures, with one entry per picture."""

    temb: Tensor  # (N, width)
    text: Tensor  # (N, L, width)
    text_bias: Tensor | None = None  # (N, L), for the text's keys in attn2
    bias: Tensor | None = None  # (N, keys of attn1)
    images: tuple[Tensor, ...] = ()  # (N, tokens, width) for each IP-Adapter, with the columns of `text`


class SelfAttention(nn.Module):
    """Self-attention of the pixels; diffusers' Attention as attn1."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    @property
    def reader(self) -> nn.Linear:
        return self.to_qkv

    def forward(self, x: Tensor | Scaled, context: Context, bias: Tensor | None) -> Tensor:
        qkv = linear(x, self.to_qkv.weight)  # (N, L, 3 C)
        return _out(self.to_out, attention(*qkv.chunk(3, dim=-1), heads=self.heads, bias=bias))


class TextAttention(nn.Module):
    """Cross-attention to a text; diffusers' Attention as attn2, and as attn1 with only_cross_attention.

    to_k and to_v are rows of the model's layer `text_projections`. This module reads their columns of its output.
    """

    columns: slice  # set by the model: the keys, then the values

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.projections = {"to_k": channels, "to_v": channels}
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    @property
    def reader(self) -> nn.Linear:
        return self.to_q

    def forward(self, x: Tensor | Scaled, context: Context, bias: Tensor | None) -> Tensor:
        keys, values = context.text[..., self.columns].chunk(2, dim=-1)
        q = linear(x, self.to_q.weight)
        y = attention(q, keys, values, heads=self.heads, bias=bias)
        for image in context.images:  # the decoupled attention of an IP-Adapter; its scale is in the values
            keys, values = image[..., self.columns].chunk(2, dim=-1)
            y = attention(q, keys, values, heads=self.heads, residual=y)
        return _out(self.to_out, y)


def _out(layers: nn.ModuleList, x: Tensor) -> Tensor:
    layer = cast(nn.Linear, layers[0])
    return linear(x, layer.weight, layer.bias)


class FeedForward(nn.Module):
    """GEGLU, linear and the residual sum; diffusers' FeedForward."""

    def __init__(self, channels: int):
        super().__init__()
        inner, outer = nn.Linear(channels, 2 * MLP * channels), nn.Linear(MLP * channels, channels)
        self.net = nn.ModuleDict({"0": nn.ModuleDict({"proj": inner}), "2": outer})

    @property
    def reader(self) -> nn.Linear:
        return cast(nn.Linear, cast(nn.ModuleDict, self.net["0"])["proj"])

    def forward(self, x: Tensor | Scaled, residual: Tensor) -> Tensor:
        inner = self.reader
        outer = cast(nn.Linear, self.net["2"])
        return linear(geglu(x, inner.weight, inner.bias), outer.weight, outer.bias, residual=residual)


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention and an MLP; diffusers' BasicTransformerBlock with layer_norm."""

    def __init__(self, channels: int, heads: int, *, only_cross: bool):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))
        self.attn1 = TextAttention(channels, heads) if only_cross else SelfAttention(channels, heads)
        self.attn2 = TextAttention(channels, heads)
        self.ff = FeedForward(channels)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        h, _ = _normed(x, None, self.norm1, self.attn1.reader)
        h, x = _normed(self.attn1(h, context, context.bias), x, self.norm2, self.attn2.reader)
        h, x = _normed(self.attn2(h, context, context.text_bias), x, self.norm3, self.ff.reader)
        return self.ff(h, x)


def _normed(
    x: Tensor, residual: Tensor | None, norm: nn.LayerNorm, reader: nn.Linear
) -> tuple[Tensor | Scaled, Tensor]:
    """Return the normalised sum of x and `residual`, as the layer `reader` takes it, and the sum."""
    y = layer_norm(x, norm.weight, norm.bias, eps=norm.eps, residual=residual, in_fp8=reader.weight.dtype == FP8)
    return y if isinstance(y, tuple) else (y, x)


class Transformer2DModel(nn.Module):
    """Transformer blocks over the pixels, with a residual; diffusers' Transformer2DModel with continuous inputs."""

    def __init__(
        self,
        channels: int,
        inner: int,
        heads: int,
        depth: int,
        *,
        groups: int,
        linear_projection: bool,
        only_cross: bool,
    ):
        super().__init__()
        projection: Any = nn.Linear if linear_projection else _Conv1x1
        self.norm = GroupNorm(groups, channels, eps=EPS)
        self.proj_in = projection(channels, inner)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(inner, heads, only_cross=only_cross) for _ in range(depth)
        )
        self.proj_out = projection(inner, channels)

    def forward(self, x: Feature, context: Context) -> Feature:
        tokens = linear(self.norm(x).x.flatten(1, 2), self.proj_in.weight.flatten(1), self.proj_in.bias)
        for block in self.transformer_blocks:
            tokens = block(tokens, context)
        out = self.proj_out  # run as a 1x1 convolution in both cases, which makes the moments
        weight = out.weight.flatten(1).unflatten(1, (-1, 1, 1))
        pixels = tokens.unflatten(1, x.x.shape[1:3])
        return as_feature(conv2d(pixels, weight, out.bias, residual=x.x, moments=True))


class _Conv1x1(nn.Conv2d):
    """A linear layer whose weight has the shape of a 1x1 convolution's, as in diffusers."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError  # the transformer reads the weight itself


def stack_text_projections(model: nn.Module, text_width: int) -> tuple[nn.Linear | None, dict[str, int]]:
    """Return one layer that makes the keys and values of all transformers, and diffusers' layers that it stacks.

    Return None and {} for a model without transformers.
    """
    widths: dict[str, int] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, TextAttention):
            start = sum(widths.values())
            layer.columns = slice(start, start + sum(layer.projections.values()))
            widths |= {f"{path}.{name}.": width for name, width in layer.projections.items()}
    return nn.Linear(text_width, sum(widths.values()), bias=False) if widths else None, widths
