"""GroupNorm with the scale and shift of a time embedding and the activation that follow it, in one read and one write.

Statistics are float32, per channel a mean and the sum of squared distances from it (M2), merged over a group by Chan's
formula. Sums of squares would cancel on a large mean: torch's own channels-last GroupNorm on the CPU is off by 3e3 at
mean 1e3 and deviation 1. Per channel, because a group may straddle the seam of a skip connection.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels._dispatch import Operation

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "gelu": F.gelu,
    "relu": lambda x: F.relu(x, inplace=True),
}


@Operation
def group_norm(
    x: Tensor | tuple[Tensor, Tensor],
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    activation: str = "none",
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """activation(GroupNorm(x) * (1 + scale) + shift), Wu and He 2018 (arXiv 1803.08494), as diffusers' ResnetBlock2D.

    Args:
        x: (N, H, W, C), float32, float16 or bfloat16; or a pair of such tensors, read as their concatenation over C.
        num_groups: divides C.
        weight, bias: (C,), or None for 1 and 0.
        eps: added to the variance.
        activation: none, silu, mish, gelu or relu.
        scale, shift: (N, C), both or neither.

    Returns: (N, H, W, C), contiguous, the dtype of x.
    """
    parts = x if isinstance(x, tuple) else (x,)
    _check(parts, num_groups, activation)
    moments = [_channel_moments(part.float()) for part in parts]
    mean, m2 = (torch.cat(both, dim=-1) for both in zip(*moments, strict=True))  # (N, C)
    a, b = _affine(mean, m2, parts[0].shape[1] * parts[0].shape[2], num_groups, weight, bias, eps)
    if scale is not None and shift is not None:
        a, b = a * (1 + scale.float()), torch.addcmul(shift.float(), b, 1 + scale.float())
    return _apply(parts, mean, a, b, activation)


def _channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (N, H, W, C) -> the mean and M2 of every channel, each (N, C)."""
    mean = x.mean(dim=(1, 2))
    return mean, (x - mean[:, None, None, :]).square_().sum(dim=(1, 2))


def _affine(
    mean: Tensor, m2: Tensor, pixels: int, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """a and b, each (N, C), such that GroupNorm(x) = a * (x - mean) + b with the channel's own mean."""
    n, channels = mean.shape
    means = mean.view(n, num_groups, -1)  # (N, G, C / G)
    offsets = means - means.mean(dim=-1, keepdim=True)
    variance = (m2.view_as(means) / pixels + offsets.square()).mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    a, b = rstd.expand_as(means).reshape(n, channels), (offsets * rstd).view(n, channels)
    if weight is not None and bias is not None:
        a, b = a * weight.float(), torch.addcmul(bias.float(), b, weight.float())
    return a, b


def _apply(parts: tuple[Tensor, ...], mean: Tensor, a: Tensor, b: Tensor, activation: str) -> Tensor:
    widths = [part.shape[-1] for part in parts]
    n, height, width, _ = parts[0].shape
    y = torch.empty(n, height, width, sum(widths), dtype=torch.float32, device=parts[0].device)
    columns = [tensor[:, None, None, :].split(widths, dim=-1) for tensor in (mean, a, b)]
    for part, out, m, scale, shift in zip(parts, y.split(widths, dim=-1), *columns, strict=True):
        torch.addcmul(shift, part.float() - m, scale, out=out)
    return ACTIVATIONS[activation](y).to(parts[0].dtype)


def _check(parts: tuple[Tensor, ...], num_groups: int, activation: str) -> None:
    if any(part.ndim != 4 or part.shape[:3] != parts[0].shape[:3] for part in parts):
        raise ValueError(f"x: expected (N, H, W, C), the same N, H and W, got {[tuple(part.shape) for part in parts]}")
    channels = sum(part.shape[-1] for part in parts)
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups: {num_groups} does not divide the {channels} channels of x")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is none of {', '.join(ACTIVATIONS)}")
