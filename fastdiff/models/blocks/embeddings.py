"""Embeddings of timesteps, and of the conditions added to them."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.checkpoints.configs.unet2d_condition import HINT_CHANNELS, IMAGE_PREFIX, IMAGE_TOKENS
from fastdiff.kernels.attention import attention
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.models.blocks.layers import ACTIVATIONS, Conv2d, Feature


class Timesteps(nn.Module):
    """Sinusoidal embedding of timesteps, DDPM (arXiv 2006.11239); diffusers' Timesteps."""

    def __init__(self, width: int, flip_sin_to_cos: bool, freq_shift: float):
        super().__init__()
        self.width, self.flip_sin_to_cos, self.freq_shift = width, flip_sin_to_cos, freq_shift

    def forward(self, timesteps: Tensor) -> Tensor:
        """(N,) -> (N, width) float32."""
        half = self.width // 2
        angles = timesteps[:, None].float() * _frequencies(half, half - self.freq_shift, timesteps.device)
        waves = [angles.cos(), angles.sin()] if self.flip_sin_to_cos else [angles.sin(), angles.cos()]
        embedding = torch.cat(waves, dim=-1)
        return F.pad(embedding, (0, 1)) if self.width % 2 else embedding


@functools.cache
def _frequencies(count: int, divisor: float, device: torch.device) -> Tensor:
    """Return 10,000^(-k / divisor), (count,) float32. It is cached, which saves four launches in each forward."""
    frequencies = torch.exp(-math.log(10_000) * torch.arange(count, dtype=torch.float32, device=device) / divisor)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # another stream may read them
    return frequencies


class GaussianFourierProjection(nn.Module):
    """Random Fourier features of noise levels or their logarithms, score SDE (arXiv 2011.13456).

    It is diffusers' class of this name.
    """

    def __init__(self, width: int, *, scale: float = 16.0, log: bool = True, flip_sin_to_cos: bool = False):
        super().__init__()
        self.log, self.flip_sin_to_cos = log, flip_sin_to_cos
        self.weight = nn.Parameter(torch.randn(width) * scale, requires_grad=False)

    def forward(self, timesteps: Tensor) -> Tensor:
        """(N,) -> (N, 2 * width)."""
        levels = torch.log(timesteps) if self.log else timesteps
        angles = levels[:, None] * self.weight * 2 * math.pi
        return torch.cat([angles.cos(), angles.sin()] if self.flip_sin_to_cos else [angles.sin(), angles.cos()], dim=-1)


class TimestepEmbedding(nn.Module):
    """Linear, activation, Linear; diffusers' TimestepEmbedding."""

    def __init__(
        self,
        in_channels: int,
        width: int,
        out_channels: int | None = None,
        activation: str = "silu",
        *,
        post_activation: str | None = None,
        condition_width: int | None = None,  # of a second input: an embedding of the guidance scale, for LCM
    ):
        super().__init__()
        self.activation, self.post_activation = activation, post_activation
        self.linear_1 = nn.Linear(in_channels, width)
        self.cond_proj = None if condition_width is None else nn.Linear(condition_width, in_channels, bias=False)
        self.linear_2 = nn.Linear(width, out_channels or width)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """(M, in_channels) and optionally (M, condition_width) -> (M, out_channels)."""
        if condition is not None and self.cond_proj is not None:
            x = x + each_through(condition, self.cond_proj)
        activate = ACTIVATIONS[self.activation]
        x = each_through(activate(each_through(x, self.linear_1)), self.linear_2)
        return x if self.post_activation is None else ACTIVATIONS[self.post_activation](x)


class AttentionPooling(nn.Module):
    """Pool a text's tokens: their mean attends to itself and to all tokens; diffusers' AttentionPooling."""

    def __init__(self, heads: int, channels: int):
        super().__init__()
        self.heads = heads
        self.positional_embedding = nn.Parameter(torch.randn(1, channels) / channels**0.5)
        self.k_proj, self.q_proj, self.v_proj = (nn.Linear(channels, channels) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(M, L, C) -> (M, C)."""
        # one by one, for the same bits in any batch
        means = torch.stack([tokens.mean(dim=0, keepdim=True) for tokens in x])
        query = means + self.positional_embedding  # (M, 1, C)
        x = torch.cat([query, x], dim=1)
        q, k, v = (
            linear(tokens, layer.weight, layer.bias)
            for tokens, layer in ((query, self.q_proj), (x, self.k_proj), (x, self.v_proj))
        )
        return attention(q, k, v, heads=self.heads)[:, 0]


class TextTimeEmbedding(nn.Module):
    """Pool and project a text, to be added to the time embedding; diffusers' TextTimeEmbedding."""

    def __init__(self, channels: int, out_channels: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.pool = AttentionPooling(heads, channels)
        self.proj = nn.Linear(channels, out_channels)
        self.norm2 = nn.LayerNorm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(M, L, C) -> (M, out_channels)."""
        x = each_through(self.pool(normed(x, self.norm1)), self.proj)
        return normed(x[None], self.norm2)[0]


class ImageProjection(nn.Module):
    """Make tokens of an image, which replace a text; diffusers' ImageProjection."""

    def __init__(self, image_width: int, text_width: int):
        super().__init__()
        self.image_embeds = nn.Linear(image_width, IMAGE_TOKENS * text_width)
        self.norm = nn.LayerNorm(text_width)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        """(M, L, anything) and (M, image_width) -> (M, IMAGE_TOKENS, text_width). The text is not read."""
        return normed(each_through(image, self.image_embeds).unflatten(1, (IMAGE_TOKENS, -1)), self.norm)


class TextImageProjection(nn.Module):
    """Put tokens of an image before a text; diffusers' TextImageProjection."""

    def __init__(self, given_width: int, image_width: int, text_width: int):
        super().__init__()
        self.image_embeds = nn.Linear(image_width, IMAGE_PREFIX * text_width)
        self.text_proj = nn.Linear(given_width, text_width)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        """(M, L, given_width) and (M, image_width) -> (M, IMAGE_PREFIX + L, text_width)."""
        tokens = each_through(image, self.image_embeds).unflatten(1, (IMAGE_PREFIX, -1))
        return torch.cat([tokens, linear(text, self.text_proj.weight, self.text_proj.bias)], dim=1)


class TextImageTimeEmbedding(nn.Module):
    """Project a pooled text and an image, to be added to the time embedding; diffusers' TextImageTimeEmbedding."""

    def __init__(self, width: int, out_channels: int):
        super().__init__()
        self.text_proj, self.image_proj = nn.Linear(width, out_channels), nn.Linear(width, out_channels)
        self.text_norm = nn.LayerNorm(out_channels)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        """(M, width) twice -> (M, out_channels)."""
        return (
            each_through(image, self.image_proj) + normed(each_through(text, self.text_proj)[None], self.text_norm)[0]
        )


class ImageTimeEmbedding(nn.Module):
    """Project an image, to be added to the time embedding; diffusers' ImageTimeEmbedding."""

    def __init__(self, image_width: int, out_channels: int):
        super().__init__()
        self.image_proj = nn.Linear(image_width, out_channels)
        self.image_norm = nn.LayerNorm(out_channels)

    def forward(self, image: Tensor) -> Tensor:
        """(M, image_width) -> (M, out_channels)."""
        return normed(each_through(image, self.image_proj)[None], self.image_norm)[0]


# Channels and stride of the convolutions that shrink a hint; their number in diffusers' Sequential is twice the index
HINT_LAYERS = ((3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 96, 2), (96, 96, 1), (96, 256, 2))


class ImageHintTimeEmbedding(ImageTimeEmbedding):
    """ImageTimeEmbedding, and convolutions of a hint; diffusers' ImageHintTimeEmbedding."""

    def __init__(self, image_width: int, out_channels: int):
        super().__init__(image_width, out_channels)
        layers = (*HINT_LAYERS, (256, HINT_CHANNELS, 1))
        self.input_hint_block = nn.ModuleDict({str(2 * i): Conv2d(a, b, 3) for i, (a, b, _) in enumerate(layers)})

    def shrink(self, hint: Tensor) -> Tensor:
        """(M, 3, 8 h, 8 w) -> (M, h, w, HINT_CHANNELS)."""
        pictures = hint.permute(0, 2, 3, 1).split(1)  # one by one, for the same bits in any batch
        return torch.cat([self._shrink(picture.contiguous()) for picture in pictures])

    def _shrink(self, x: Tensor) -> Tensor:
        *convolutions, last = self.input_hint_block.values()
        for layer, (_, _, stride) in zip(convolutions, HINT_LAYERS, strict=True):
            x = ACTIVATIONS["silu"](layer(Feature(x), stride=stride, padding=1, moments=False).x)
        return last(Feature(x), moments=False).x


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Apply a LayerNorm to x (N, L, C)."""
    y = layer_norm(x, norm.weight, norm.bias, eps=norm.eps)
    assert isinstance(y, Tensor)  # layer_norm returns a pair only with a residual
    return y


def each_through(x: Tensor, layer: nn.Linear) -> Tensor:
    """Apply a linear layer to x (M, C_in). The bits of a row do not depend on the other rows."""
    return linear(x[None], layer.weight, layer.bias)[0]
