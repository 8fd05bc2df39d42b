"""The leaves of the U-Net: convolution and norm. Pictures are (N, H, W, C) throughout.

Parameters are named as diffusers names them, except that an attention holds one fused projection `to_qkv`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.kernels.conv2d import Norm, Padding, Shortcut, conv2d
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.moments import Moments

ACTIVATIONS = {"silu": F.silu, "mish": F.mish, "gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True)
class Feature:
    """A picture inside the U-Net, with what its convolution knows of it for the norm that follows."""

    x: Tensor  # (N, H, W, C)
    moments: Moments | None = None


Picture = Feature | tuple[Feature, Feature]  # a pair is a skip connection that nobody concatenates


def tensors(x: Picture) -> Tensor | tuple[Tensor, Tensor]:
    return x.x if isinstance(x, Feature) else (x[0].x, x[1].x)


def join(x: Picture) -> Feature:
    """One feature, for the rare operations that cannot read a pair."""
    return x if isinstance(x, Feature) else Feature(torch.cat(tensors(x), dim=-1))


def normalise(x: Picture, norm: Norm) -> Feature:
    """`kernels.group_norm` with the moments that x brings along."""
    moments = x.moments if isinstance(x, Feature) else (x[0].moments, x[1].moments)
    return Feature(group_norm(tensors(x), moments=moments, **norm._asdict()))


class Conv2d(nn.Conv2d):
    """torch's Conv2d over (N, H, W, C), with the epilogue of `kernels.conv2d`."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, bias: bool = True):
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=bias)

    def forward(
        self,
        x: Picture,
        *,
        padding: Padding | None = None,
        residual: Feature | None = None,
        shortcut: "tuple[Picture, Conv2d] | None" = None,
        norm: Norm | None = None,
        moments: bool = True,
        **options,
    ) -> Feature:
        """`shortcut`: a picture and its 1x1 convolution, to be added; `norm` follows; `moments`: for one later.

        The other options are those of `kernels.conv2d`.
        """
        padding = self.padding[0] if padding is None else padding
        if shortcut is not None:
            picture, layer = shortcut
            options["shortcut"] = Shortcut(tensors(picture), layer.weight, layer.bias)
        moments = moments and norm is None
        options |= {"padding": padding, "residual": residual.x if residual is not None else None, "norm": norm}
        y = conv2d(tensors(x), self.weight, self.bias, moments=moments, **options)
        return Feature(*y) if moments else Feature(y)


class GroupNorm(nn.GroupNorm):
    """torch's GroupNorm over (N, H, W, C), with the scale, shift and activation of `kernels.group_norm`."""

    def forward(self, x: Picture, **epilogue) -> Feature:
        return normalise(x, self.after(**epilogue))

    def after(self, **epilogue) -> Norm:
        """The same as a part of the convolution before it."""
        return Norm(self.num_groups, self.weight, self.bias, self.eps, **epilogue)


# Resampling without weights, of the rarer blocks: plain channels-last torch.
