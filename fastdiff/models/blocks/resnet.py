"""The residual blocks of U-Nets and VAEs.

A residual block reads time and class from its own columns of one tensor `temb` (N, width). It has the time projections
of all blocks side by side, which the model makes before the sampling loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastdiff.kernels.conv2d import Norm
from fastdiff.models.blocks.layers import Conv2d, Feature, FeatureOrPair, GroupNorm, join, normalise

Resample = Callable[[Feature], Feature]


@dataclass(frozen=True)
class BlockOptions:
    """Options that all blocks of one model share."""

    temb_channels: int
    eps: float
    activation: str
    scale_shift: bool  # the time embedding scales and shifts the second norm, instead of being added before it
    num_groups: int | None  # None if all blocks are skip blocks, which choose their own
    head_dim: int | None  # None: one head as wide as the block
    downsample_padding: int
    raw: bool = False  # residual blocks project the time embedding itself, without an activation before

    @property
    def groups(self) -> tuple[int, int]:
        """The groups of a residual block's two norms, unless the block chooses its own."""
        assert self.num_groups is not None  # guaranteed by the config's check
        return self.num_groups, self.num_groups


class Conditioned(nn.Module):
    """A block that reads the time embedding from its own columns of the model's `temb`.

    The model stacks the projections of all blocks, so that they are one product.
    """

    projections: dict[str, int]  # diffusers' names of this block's projections -> the number of columns of each
    columns: slice  # set by the model
    raw: bool = False  # whether the projections read the embedding itself, without an activation before


def _shortcut(x: FeatureOrPair, layer: Conv2d | None) -> dict[str, Any]:
    """Return what a residual block's last convolution adds: the block's input, through its 1x1 convolution if any."""
    return {"residual": join(x)} if layer is None else {"shortcut": (x, layer)}


class ResnetBlock2D(Conditioned):
    """Norm, act, conv, + time, norm, act, conv, + shortcut; diffusers' ResnetBlock2D."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        options: BlockOptions,
        *,
        groups: tuple[int, int] | None = None,  # of the two norms; default: the model's
        output_scale: float = 1.0,
        resample: Resample | None = None,
        shortcut: bool = False,  # a 1x1 convolution even if the widths are equal
    ):
        super().__init__()
        groups_in, groups_out = groups or options.groups
        self.activation, self.scale_shift, self.raw = options.activation, options.scale_shift, options.raw
        self.output_scale, self.resample = output_scale, resample
        self.norm1 = GroupNorm(groups_in, in_channels, eps=options.eps)
        self.conv1 = Conv2d(in_channels, out_channels, 3)
        self.projections = {"time_emb_proj": out_channels * (2 if self.scale_shift else 1)}
        self.norm2 = GroupNorm(groups_out, out_channels, eps=options.eps)
        self.conv2 = Conv2d(out_channels, out_channels, 3)
        needs_shortcut = shortcut or in_channels != out_channels
        self.conv_shortcut = Conv2d(in_channels, out_channels, 1) if needs_shortcut else None

    def forward(self, x: FeatureOrPair, temb: Tensor | None = None) -> Feature:
        """Run the block. `temb` is None in a model without time, such as a VAE."""
        temb = None if temb is None else temb[:, self.columns]
        h = self.norm1(x, activation=self.activation)
        if self.resample is not None:
            x, h = self.resample(join(x)), self.resample(h)
        if self.scale_shift and temb is not None:
            scale, shift = temb.chunk(2, dim=1)
            h = self.conv1(h, norm=self.norm2.after(activation=self.activation, scale=scale, shift=shift))
        else:
            h = self.conv1(h, temb=temb, norm=self.norm2.after(activation=self.activation))
        return self.conv2(h, **_shortcut(x, self.conv_shortcut), output_scale=self.output_scale)


class AdaGroupNorm(nn.Module):
    """GroupNorm whose scale and shift are projected from the time embedding; diffusers' AdaGroupNorm."""

    def __init__(self, channels: int, num_groups: int, options: BlockOptions):
        super().__init__()
        if num_groups < 1 or channels % num_groups:
            raise ValueError(f"num_channels ({channels}) must be divisible by num_groups ({num_groups})")
        self.num_groups, self.eps, self.activation = num_groups, options.eps, options.activation

    def forward(self, x: FeatureOrPair, temb: Tensor) -> Feature:
        return normalise(x, self.after(temb))

    def after(self, temb: Tensor) -> Norm:
        """Return this norm as part of the epilogue of the convolution before it."""
        scale, shift = temb.chunk(2, dim=1)
        return Norm(self.num_groups, eps=self.eps, activation=self.activation, scale=scale, shift=shift)


class ResnetBlockCondNorm2D(Conditioned):
    """A residual block whose norms read the time embedding; diffusers' ResnetBlockCondNorm2D with ada_group."""

    raw = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        options: BlockOptions,
        *,
        groups: tuple[int, int],
        last: int | None = None,  # channels after the second convolution; default: out_channels
    ):
        super().__init__()
        last = last or out_channels
        self.projections = {"norm1.linear": 2 * in_channels, "norm2.linear": 2 * out_channels}
        self.norm1 = AdaGroupNorm(in_channels, groups[0], options)
        self.conv1 = Conv2d(in_channels, out_channels, 3)
        self.norm2 = AdaGroupNorm(out_channels, groups[1], options)
        self.conv2 = Conv2d(out_channels, last, 3)
        self.conv_shortcut = Conv2d(in_channels, last, 1, bias=False) if in_channels != last else None

    def forward(self, x: FeatureOrPair, temb: Tensor) -> Feature:
        temb1, temb2 = temb[:, self.columns].split(list(self.projections.values()), dim=1)
        h = self.conv1(self.norm1(x, temb1), norm=self.norm2.after(temb2))
        return self.conv2(h, **_shortcut(x, self.conv_shortcut))
