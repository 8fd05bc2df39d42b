"""Self-attention over the pixels of a picture."""

from typing import cast

from torch import Tensor, nn

from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import conv2d
from fastdiff.kernels.linear import linear
from fastdiff.models.blocks.layers import Feature, GroupNorm, as_feature


class Attention(nn.Module):
    """Self-attention over the pixels, with a residual; diffusers' Attention as in its UNet2DModel."""

    def __init__(self, channels: int, head_dim: int, num_groups: int | None, eps: float, output_scale: float):
        super().__init__()
        self.heads = channels // head_dim
        self.output_scale = output_scale
        width = self.heads * head_dim
        self.group_norm = GroupNorm(num_groups, channels, eps=eps) if num_groups is not None else None
        self.to_qkv = nn.Linear(channels, 3 * width)
        self.to_out = nn.ModuleList([nn.Linear(width, channels)])

    def forward(self, x: Feature) -> Feature:
        h = self.group_norm(x) if self.group_norm is not None else x
        qkv = linear(h.x.flatten(1, 2), self.to_qkv.weight, self.to_qkv.bias)  # (N, H * W, 3 * width)
        return project_out(attention(*qkv.chunk(3, dim=-1), heads=self.heads), self.to_out, x, self.output_scale)


def project_out(tokens: Tensor, layers: nn.ModuleList, x: Feature, output_scale: float = 1.0) -> Feature:
    """Return the sum of x and an attention's output (N, H * W, width) after its last layer, over `output_scale`."""
    out = cast(nn.Linear, layers[0])  # run as a 1x1 convolution, which makes the moments
    weight, pixels = out.weight.unflatten(1, (-1, 1, 1)), tokens.unflatten(1, x.x.shape[1:3])
    return as_feature(conv2d(pixels, weight, out.bias, residual=x.x, output_scale=output_scale, moments=True))
