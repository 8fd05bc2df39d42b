"""GroupNorm with the scale and shift of a time embedding and the activation that follow it, in one read and one write.

Statistics are float32, per channel a mean and the sum of squared distances from it (M2), merged over a group by Chan's
formula. Sums of squares would cancel on a large mean: torch's own channels-last GroupNorm on the CPU is off by 3e3 at
mean 1e3 and deviation 1. Per channel, because a group may straddle the seam of a skip connection.

On the GPU they are `Moments`: a convolution's epilogue leaves them, or `moments_kernel` reads the tensor for them. Many
tiles become one in `merge_kernel`; the few that are left, and the channels of a group, are merged by every program of
`normalise_kernel` for itself, so that a small picture takes one launch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels._dispatch import Declined, Operation, parts_of
from fastdiff.kernels._group_norm_kernels import merge_kernel, moments_kernel, normalise_kernel
from fastdiff.kernels._launch import DTYPES, launch
from fastdiff.kernels._moments import Moments
from fastdiff.kernels._triton import triton
from fastdiff.kernels.report import because

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
    moments: Moments | tuple[Moments | None, Moments | None] | None = None,
) -> Tensor:
    """activation(GroupNorm(x) * (1 + scale) + shift), Wu and He 2018 (arXiv 1803.08494), as diffusers' ResnetBlock2D.

    Args:
        x: (N, H, W, C), float32, float16 or bfloat16; or a pair of such tensors, read as their concatenation over C.
        num_groups: divides C.
        weight, bias: (C,) of any float dtype, both or neither; None for 1 and 0.
        eps: added to the variance.
        activation: none, silu, mish, gelu or relu.
        scale, shift: (N, C) of any float dtype, both or neither; rows may be strided.
        moments: the statistics of x, for a pair a pair; those that are None are computed.

    Returns: (N, H, W, C), contiguous, the dtype of x. Raises ValueError naming the argument that does not fit.
    """
    parts = parts_of(x)
    given = check(parts, num_groups, weight, bias, activation, scale, shift, moments)
    merged = [
        _channel_moments(part.float()) if known is None else _merge(known, part.shape[1] * part.shape[2])
        for part, known in zip(parts, given, strict=True)
    ]
    mean, m2 = (torch.cat(both, dim=-1) for both in zip(*merged, strict=True))  # (N, C)
    a, b = _affine(mean, m2, parts[0].shape[1] * parts[0].shape[2], num_groups, weight, bias, eps)
    if scale is not None and shift is not None:
        a, b = a * (1 + scale.float()), torch.addcmul(shift.float(), b, 1 + scale.float())
    return _apply(parts, mean, a, b, activation)


def _channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (N, H, W, C) -> the mean and M2 of every channel, each (N, C)."""
    mean = x.mean(dim=(1, 2))
    return mean, (x - mean[:, None, None, :]).square_().sum(dim=(1, 2))


def _merge(moments: Moments, hw: int) -> tuple[Tensor, Tensor]:
    """The mean and M2 of every channel over all tiles of a picture of `hw` pixels, each (N, C)."""
    starts = torch.arange(moments.mean.shape[1], device=moments.mean.device) * moments.pixels
    counts = (hw - starts).clamp(max=moments.pixels).to(torch.float32)[:, None]  # (tiles, 1)
    mean = (counts * moments.mean).sum(dim=1) / hw
    return mean, (moments.m2 + counts * (moments.mean - mean[:, None]).square()).sum(dim=1)


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


class Tiling(NamedTuple):
    """Sizes that depend on the picture's shape and dtype alone: with them every sum has its order."""

    channels: int  # of a program
    pixels: int  # of one step of a program's loop
    warps: int


def _tiling(hw: int, widths: list[int]) -> Tiling:
    # the widest block that wastes no lanes, for whole lines of memory
    waste = {block: sum(-width % block for width in widths) for block in (64, 32)}
    return Tiling(min(waste, key=waste.get), min(32, triton.next_power_of_2(hw)), 4)


def _moments(x: Tensor, tiling: Tiling) -> Moments:
    n, height, width, channels = x.shape
    hw = height * width
    pixels = min(512, max(32, triton.next_power_of_2(hw) // 8))
    tiles = triton.cdiv(hw, pixels)
    mean, m2 = (x.new_empty(n, tiles, channels, dtype=torch.float32) for _ in range(2))
    launch(
        moments_kernel, (n * tiles * triton.cdiv(channels, tiling.channels),),
        mean, m2, x, hw, channels, tiles, pixels, x.stride(0), x.stride(2),
        BP=tiling.pixels, BC=tiling.channels, num_warps=tiling.warps, fp_fusion=False,
    )  # fmt: skip
    return Moments(mean, m2, pixels)


def _one_tile(known: list[Moments], hw: int) -> list[Moments]:
    """The moments of a tensor, or of a pair, each merged into those of one tile."""
    n, tiles = len(known[0].mean), max(m.mean.shape[1] for m in known)
    widths = [m.mean.shape[2] for m in known]
    rows, columns = (256, 8) if tiles > 64 else (32, 32)
    merged = [
        Moments(m.mean.new_empty(n, 1, width), m.m2.new_empty(n, 1, width), hw)
        for m, width in zip(known, widths, strict=True)
    ]
    launch(
        merge_kernel, (n * sum(triton.cdiv(width, columns) for width in widths),),
        *_statistics(merged), *_statistics(known), n, *_pair(widths, 0), *_tiles(known), hw,
        BT=rows, BC=columns, num_warps=4, fp_fusion=False,
    )  # fmt: skip
    return merged


def _statistics(known: list[Moments]) -> tuple:
    return *_pair([m.mean for m in known]), *_pair([m.m2 for m in known])


def _tiles(known: list[Moments]) -> tuple[int, ...]:
    """How many, and of how many pixels."""
    return *_pair([m.mean.shape[1] for m in known], 0), *_pair([m.pixels for m in known], 0)


FOLDED = 32  # statistics of a channel's group, up to which each program of the normalise pass merges them
PROGRAMS = 256  # of the normalise pass, at least, where there are blocks of pixels enough


@group_norm.kernel
def _group_norm_triton(
    x, num_groups, weight=None, bias=None, *, eps, activation="none", scale=None, shift=None, moments=None
):
    parts = parts_of(x)
    given = check(parts, num_groups, weight, bias, activation, scale, shift, moments)
    if parts[0].dtype not in DTYPES:
        return Declined(f"{parts[0].dtype} has no kernel")
    because(lambda: "moments by its convolution" if None not in given else "reads the tensor for its moments")
    parts = [_as_rows(part) for part in parts]
    n, height, width, _ = parts[0].shape
    hw, widths = height * width, [part.shape[-1] for part in parts]
    group_width, tiling = sum(widths) // num_groups, _tiling(hw, widths)
    known = [m or _moments(part, tiling) for part, m in zip(parts, given, strict=True)]
    whole = _whole_groups(group_width, widths, tiling)
    each = 1 if whole else group_width
    if each * max(m.mean.shape[1] for m in known) > FOLDED:
        known = _one_tile(known, hw)
    entries = each * max(m.mean.shape[1] for m in known)

    y = parts[0].new_empty(n, height, width, sum(widths))
    blocks = n * sum(triton.cdiv(width, tiling.channels) for width in widths)
    # several blocks of pixels share a merge, where that leaves programs enough
    most = 16 if entries > 4 else 8
    span = tiling.pixels * min(most, max(1, blocks * triton.cdiv(hw, tiling.pixels) // PROGRAMS))
    grid = (blocks * triton.cdiv(hw, span),)
    launch(
        normalise_kernel, grid,
        y, *_pair(parts), *_statistics(known), weight, bias, scale, shift, *_pair(widths, 0), *_tiles(known), hw,
        group_width, eps,
        *((0, 0) if scale is None else (scale.stride(0), shift.stride(0))), span,
        *_pair([part.stride(0) for part in parts], 0), *_pair([part.stride(2) for part in parts], 0),
        ACTIVATION=activation, BP=tiling.pixels, BC=tiling.channels, WHOLE=whole,
        BJ=4 if entries <= 4 else 8 if each > 1 else 16, num_warps=tiling.warps, fp_fusion=False,
    )  # fmt: skip
    return y


def _whole_groups(group_width: int, widths: list[int], tiling: Tiling) -> int:
    """The width of a group, where groups fill each program's channels; else 0."""
    fitting = tiling.channels % group_width == 0 and all(width % group_width == 0 for width in widths)
    return group_width if fitting else 0


def _pair(values: list, absent=None) -> tuple:
    """What there is of one tensor or of two, as the kernels take it: the second absent, where there is one."""
    return tuple(values) if len(values) == 2 else (values[0], absent)


def _as_rows(x: Tensor) -> Tensor:
    """x (N, H, W, C) with its pixels one stride apart and its channels side by side: itself, or a copy."""
    rows = x.stride(3) == 1 and (x.stride(1) == x.shape[2] * x.stride(2) or x.shape[1] == 1)
    return x if rows else x.contiguous()


def check(parts, num_groups, weight, bias, activation, scale, shift, moments=None) -> tuple[Moments | None, ...]:
    """Raises ValueError naming the argument that does not fit; returns the moments of each part."""
    first = parts[0]
    if any(part.ndim != 4 or part.shape[:3] != first.shape[:3] for part in parts):
        raise ValueError(f"x: expected (N, H, W, C), the same N, H and W, got {[tuple(part.shape) for part in parts]}")
    if any((part.dtype, part.device) != (first.dtype, first.device) for part in parts) or not first.is_floating_point():
        raise ValueError(f"x: expected one float dtype on one device, got {[(p.dtype, str(p.device)) for p in parts]}")
    channels = sum(part.shape[-1] for part in parts)
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups: {num_groups} does not divide the {channels} channels of x")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is none of {', '.join(ACTIVATIONS)}")
    for names, pair, shape in (
        (("weight", "bias"), (weight, bias), (channels,)),
        (("scale", "shift"), (scale, shift), (first.shape[0], channels)),
    ):
        for name, tensor, other in zip(names, pair, reversed(pair), strict=True):
            if (tensor is None) != (other is None):
                raise ValueError(f"{', '.join(names)}: give both or neither")
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: expected {shape}, got {tuple(tensor.shape)}")
            if tensor is not None and tensor.device != first.device:
                raise ValueError(f"{name}: on {tensor.device}, but x is on {first.device}")
    return _check_moments(parts, moments)


def _check_moments(parts, moments) -> tuple[Moments | None, ...]:
    if moments is None:
        return (None,) * len(parts)
    given = (moments,) if isinstance(moments, Moments) else moments
    if len(given) != len(parts):
        raise ValueError(f"moments: {len(given)} for {len(parts)} tensors; give a pair for a pair")
    for part, known in zip(parts, given, strict=True):
        if known is not None:
            shape = (part.shape[0], -(-part.shape[1] * part.shape[2] // known.pixels), part.shape[3])
            if any(tuple(half.shape) != shape or half.dtype != torch.float32 for half in (known.mean, known.m2)):
                raise ValueError(f"moments: expected float32 {shape}, got {known.mean.dtype} {tuple(known.mean.shape)}")
    return given
