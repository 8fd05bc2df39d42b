"""GroupNorm with the scale and shift of a time embedding and the activation that follow it, in one read and one write.

Statistics are float32, per channel a mean and the sum of squared distances from it (M2), merged over a group by Chan's
formula. Sums of squares would cancel on a large mean: torch's own channels-last GroupNorm on the CPU is off by 3e3 at
mean 1e3 and deviation 1. Per channel, because a group may straddle the seam of a skip connection.

On the GPU they are `Moments`: a convolution's epilogue leaves them, or `moments_kernel` reads the tensor for them. Few
tiles are merged by every program of `normalise_kernel` for itself, so that a small picture takes one launch; many, or
those of many pictures, by `merge_kernel`, and `apply_kernel` does the rest.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.device.group_norm import apply_kernel, merge_kernel, moments_kernel, normalise_kernel
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.dispatch import Declined, Operation, parts_of
from fastdiff.kernels.host.launching import DTYPES, launch, side_by_side
from fastdiff.kernels.host.moments import Moments
from fastdiff.kernels.host.recording import because

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


def _tiling(hw: int, widths: list[int], blocks: tuple[int, ...] = (64, 32)) -> Tiling:
    # the widest block that wastes no lanes, for whole lines of memory
    waste = {block: sum(-width % block for width in widths) for block in blocks}
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


def _statistics(known: list[Moments]) -> dict[str, Any]:
    """The moments of a tensor, or of a pair, as the kernels take them."""
    mean, mean2 = _pair([m.mean for m in known])
    m2, m2_2 = _pair([m.m2 for m in known])
    tiles, tiles2 = _pair([m.mean.shape[1] for m in known], 0)
    pixels, pixels2 = _pair([m.pixels for m in known], 0)
    return dict(
        mean_ptr=mean, mean2_ptr=mean2, m2_ptr=m2, m2_2_ptr=m2_2, tiles=tiles, tiles2=tiles2, pixels=pixels,
        pixels2=pixels2,
    )  # fmt: skip


def affine_arguments(
    weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float
) -> dict[str, Any]:
    """What a norm does beyond the statistics, as the kernels take it."""
    scale, shift = side_by_side(scale), side_by_side(shift)
    strides = (0, 0) if scale is None else (scale.stride(0), shift.stride(0))
    return dict(
        weight_ptr=weight, bias_ptr=bias, scale_ptr=scale, shift_ptr=shift, scale_stride=strides[0],
        shift_stride=strides[1], eps=eps,
    )  # fmt: skip


FOLDED = 32  # tiles of a channel, or of its group, up to which each program of `normalise_kernel` merges them
LARGE = 2**23  # elements from which they are merged beforehand all the same, where channels make whole groups
PROGRAMS = 256  # of `normalise_kernel`, at least, where there are blocks of pixels enough


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
    known = [m or _moments(part, _tiling(hw, widths)) for part, m in zip(parts, given, strict=True)]
    y = parts[0].new_empty(n, height, width, sum(widths))
    group_width = y.shape[-1] // num_groups
    whole = _whole_groups(group_width, widths)
    tiles = max(m.mean.shape[1] for m in known)
    affine = affine_arguments(weight, bias, scale, shift, eps)
    if tiles * (1 if whole else group_width) > FOLDED:
        rows, columns = (256, 8) if tiles > 64 else (64, 16)
        merged = _merge_tiles(known, hw, affine, whole, rows=rows, columns=max(columns, whole), tree=False)
    elif whole and y.numel() >= LARGE:
        merged = _merge_tiles(known, hw, affine, whole, rows=_rows(tiles, whole), columns=128, tree=True)
    else:
        return _normalise(y, parts, activation, known, affine, whole, group_width)
    if whole:
        return _apply_merged(y, parts, activation, *merged)
    known = [Moments(*(plane[:, None] for plane in merged), hw)]
    return _normalise(y, parts, activation, known, affine, whole, group_width)


def _rows(entries: int, whole: int) -> int:
    """Tiles, or tiles and channels of a group, that `normalise_kernel` merges at a time."""
    return 4 if entries <= 4 else 16 if whole else 8


def _merge_tiles(
    known: list[Moments], hw: int, affine: dict[str, Any], whole: int, *, rows: int, columns: int, tree: bool
) -> Tensor:
    """All tiles of a picture as one: (2, N, C) mean and M2; for whole groups (3, N, C), mean, a and b of the norm."""
    n, widths = len(known[0].mean), [m.mean.shape[2] for m in known]
    merged = known[0].mean.new_empty(3 if whole else 2, n, sum(widths))
    mean, m2, b = merged if whole else (*merged, None)
    launch(
        merge_kernel, (n * sum(triton.cdiv(width, columns) for width in widths),),
        mean, m2, b, channels=widths[0], channels2=sum(widths[1:]), hw=hw, **_statistics(known), **affine,
        WHOLE=whole, TREE=tree, BT=rows, BC=columns, num_warps=1 if tree else 4, fp_fusion=False,
    )  # fmt: skip
    return merged


def _pictures(parts: list[Tensor]) -> dict[str, Any]:
    """A tensor, or a pair, as the kernels take it."""
    x, x2 = _pair(parts)
    (image, image2), (pixel, pixel2) = (_pair([part.stride(i) for part in parts], 0) for i in (0, 2))
    return dict(
        x_ptr=x, x2_ptr=x2, channels=x.shape[-1], channels2=0 if x2 is None else x2.shape[-1],
        hw=x.shape[1] * x.shape[2], image_stride=image, image_stride2=image2, pixel_stride=pixel, pixel_stride2=pixel2,
    )  # fmt: skip


def _apply_merged(y: Tensor, parts: list[Tensor], activation: str, mean: Tensor, a: Tensor, b: Tensor) -> Tensor:
    widths = [part.shape[-1] for part in parts]
    tiling = _tiling(y.shape[1] * y.shape[2], widths, (128, 64, 32))
    blocks = len(y) * sum(triton.cdiv(width, tiling.channels) for width in widths)
    launch(
        apply_kernel, (blocks * triton.cdiv(y.shape[1] * y.shape[2], tiling.pixels),),
        y, mean_ptr=mean, a_ptr=a, b_ptr=b, **_pictures(parts),
        ACTIVATION=activation, BP=tiling.pixels, BC=tiling.channels, num_warps=tiling.warps, fp_fusion=False,
    )  # fmt: skip
    return y


def _normalise(
    y: Tensor, parts: list[Tensor], activation: str, known: list[Moments], affine: dict[str, Any], whole: int,
    group_width: int,
) -> Tensor:  # fmt: skip
    hw, widths, merged = y.shape[1] * y.shape[2], [p.shape[-1] for p in parts], [m.mean.shape[2] for m in known]
    tiling, entries = _tiling(hw, widths), max(m.mean.shape[1] for m in known) * (1 if whole else group_width)
    blocks = len(y) * sum(triton.cdiv(width, tiling.channels) for width in widths)
    # several blocks of pixels share a merge, where that leaves programs enough
    most = 16 if entries > 4 else 8
    span = tiling.pixels * min(most, max(1, blocks * triton.cdiv(hw, tiling.pixels) // PROGRAMS))
    launch(
        normalise_kernel, (blocks * triton.cdiv(hw, span),),
        y, **_pictures(parts), **_statistics(known), **affine, merged=merged[0], merged2=sum(merged[1:]),
        group_width=group_width, span=span, ACTIVATION=activation, WHOLE=whole, BP=tiling.pixels, BC=tiling.channels,
        BJ=_rows(entries, whole), num_warps=tiling.warps, fp_fusion=False,
    )  # fmt: skip
    return y


def _whole_groups(group_width: int, widths: list[int]) -> int:
    """The width of a group, where groups fill each program's channels; else 0."""
    return group_width if 32 % group_width == 0 and all(width % group_width == 0 for width in widths) else 0


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
