"""The basic layers of U-Nets and VAEs: convolution and norm. Pictures are (N, H, W, C) throughout.

Parameters have diffusers' names, except that an attention has one fused projection `to_qkv`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.kernels.conv2d import Norm, Padding, Shortcut, conv2d
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.moments import Moments

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "mish": F.mish, "gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True)
class Feature:
    """Pictures inside a U-Net or VAE, with moments for the next norm if the convolution before made them."""

    x: Tensor  # (N, H, W, C)
    moments: Moments | None = None


FeatureOrPair = Feature | tuple[Feature, Feature]  # a pair: an input and its skip connection, never concatenated


def tensors(x: FeatureOrPair) -> Tensor | tuple[Tensor, Tensor]:
    """Return the tensor of a feature, or the two tensors of a pair, as kernels take them."""
    return x.x if isinstance(x, Feature) else (x[0].x, x[1].x)


def join(x: FeatureOrPair) -> Feature:
    """Concatenate a pair to one feature, for the few operations that cannot read a pair."""
    return x if isinstance(x, Feature) else Feature(torch.cat([part.x for part in x], dim=-1))


def normalise(x: FeatureOrPair, norm: Norm) -> Feature:
    """Apply `kernels.group_norm`, with the moments of x if it has any."""
    moments = x.moments if isinstance(x, Feature) else (x[0].moments, x[1].moments)
    return Feature(group_norm(tensors(x), moments=moments, **norm._asdict()))


def as_feature(y: Tensor | tuple[Tensor, Moments | None]) -> Feature:
    """Return the output of `kernels.conv2d`, with or without moments, as a feature."""
    return Feature(*y) if isinstance(y, tuple) else Feature(y)


def plus(feature: Feature, residual: Tensor) -> Feature:
    """Return the sum with a residual (N, H, W, C) or (N, 1, 1, C)."""
    return Feature(feature.x + residual.contiguous())


class Conv2d(nn.Conv2d):
    """torch's Conv2d over (N, H, W, C), with the epilogue of `kernels.conv2d`."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, bias: bool = True):
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=bias)

    def forward(  # type: ignore[override]  # features, not tensors
        self,
        x: FeatureOrPair,
        *,
        padding: Padding | None = None,
        residual: Feature | None = None,
        shortcut: "tuple[FeatureOrPair, Conv2d] | None" = None,
        norm: Norm | None = None,
        moments: bool = True,
        **options: Any,
    ) -> Feature:
        """Convolve, with a fused epilogue.

        Args:
            x: a feature, or a pair that is read as if concatenated.
            padding: as in `kernels.conv2d`; by default half of the kernel.
            residual: added to the output.
            shortcut: an input and its 1x1 convolution, added to the output.
            norm: applied to the output.
            moments: whether to return moments for a later norm; without effect if `norm` is given.
            options: further options of `kernels.conv2d`.
        """
        padding = self.kernel_size[0] // 2 if padding is None else padding
        if shortcut is not None:
            source, layer = shortcut
            options["shortcut"] = Shortcut(tensors(source), layer.weight, layer.bias)
        moments = moments and norm is None
        options |= {"padding": padding, "residual": residual.x if residual is not None else None, "norm": norm}
        return as_feature(conv2d(tensors(x), self.weight, self.bias, moments=moments, **options))


class GroupNorm(nn.GroupNorm):
    """torch's GroupNorm over (N, H, W, C), with the scale, shift and activation of `kernels.group_norm`."""

    def forward(self, x: FeatureOrPair, **epilogue: Any) -> Feature:  # type: ignore[override]  # features, not tensors
        return normalise(x, self.after(**epilogue))

    def after(self, **epilogue: Any) -> Norm:
        """Return this norm as part of the epilogue of the convolution before it."""
        return Norm(self.num_groups, self.weight, self.bias, self.eps, **epilogue)
