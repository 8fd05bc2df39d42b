"""GroupNorm with the scale and shift of a time embedding and the activation that follow it, in one read and one write.

Statistics are float32, per channel a mean and the sum of squared distances from it (M2), merged over a group by Chan's
formula. Sums of squares would cancel on a large mean: torch's own channels-last GroupNorm on the CPU is off by 3e3 at
mean 1e3 and deviation 1. Per channel, because a group may straddle the seam of a skip connection.

On the GPU the statistics are `Moments`: a convolution's epilogue leaves them, or `_moments_kernel` reads the tensor for
them. Many tiles are merged into one by `_merge_kernel`; every program of `_normalise_kernel` merges the rest, channels
of its groups included, so that a small picture takes one launch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels._dispatch import Operation
from fastdiff.kernels._launch import launch
from fastdiff.kernels._math import activate
from fastdiff.kernels._moments import Moments
from fastdiff.kernels._triton import tl, triton

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "gelu": F.gelu,
    "relu": lambda x: F.relu(x, inplace=True),
}

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    parts = x if isinstance(x, tuple) else (x,)
    given = _check(parts, num_groups, weight, bias, activation, scale, shift, moments)
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


# One compiled variant for all of them.
SIZES = ("tiles", "tiles2", "pixels", "pixels2", "hw", "group_width", "span", "scale_stride", "shift_stride")


@triton.jit
def _moments_kernel(
    mean_ptr, m2_ptr, x_ptr, hw, channels, tiles, pixels, image_stride, pixel_stride, BP: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Moments of one tile and BC channels: Welford's recurrence down BP rows side by side, then Chan's across them."""
    blocks = tl.cdiv(channels, BC)
    pid = tl.program_id(0)
    image_tile, c = pid // blocks, pid % blocks * BC + tl.arange(0, BC)
    n, first = (image_tile // tiles).to(tl.int64), image_tile % tiles * pixels
    count = tl.minimum(pixels, hw - first)
    rows = tl.arange(0, BP)
    x_ptrs = x_ptr + n * image_stride + first.to(tl.int64) * pixel_stride + rows[:, None] * pixel_stride + c[None, :]

    mean = tl.zeros((BP, BC), tl.float32)
    m2 = tl.zeros((BP, BC), tl.float32)
    for start in range(0, count, BP):
        mask = (start + rows < count)[:, None] & (c < channels)[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        delta = tl.where(mask, x - mean, 0.0)
        mean += delta * (1.0 / (start // BP + 1))
        m2 += delta * (x - mean)
        x_ptrs += BP * pixel_stride

    weights = ((count - rows + BP - 1) // BP).to(tl.float32)[:, None]  # pixels that each row has seen
    total = tl.sum(mean * weights, axis=0) / count
    distance = mean - total[None, :]
    out = image_tile.to(tl.int64) * channels + c
    tl.store(mean_ptr + out, total, mask=c < channels)
    tl.store(m2_ptr + out, tl.sum(m2 + weights * distance * distance, axis=0), mask=c < channels)


@triton.jit
def _load_pair(ptr, ptr2, n, t, c, mask, channels, channels2, tiles, tiles2):
    """Rows t and columns c of statistics (N, tiles, C), or of those of a pair side by side; 0 where masked."""
    values = tl.load(ptr + (n * tiles + t) * channels + c, mask=mask & (c < channels), other=0.0)
    if ptr2 is not None:
        c2 = c - channels
        values += tl.load(ptr2 + (n * tiles2 + t) * channels2 + c2, mask=mask & (c2 >= 0), other=0.0)
    return values


@triton.jit
def _coefficients(
    mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, n, c,
    channels, channels2, tiles, tiles2, pixels, pixels2, hw, group_width, eps, scale_stride, shift_stride,
    BJ: tl.constexpr,
):  # fmt: skip
    """mean, a and b of the channels c of an image, such that the result before activation is a * (x - mean) + b.

    Chan's formula over the tiles and channels of a group, BJ at a time in order, as sums about the mean of the first:
    it is one of the entries merged, so no more digits can cancel than there are in their number.
    """
    group = c // group_width * group_width
    inside = c < channels + channels2
    base = _load_pair(mean_ptr, mean2_ptr, n, 0, group, inside, channels, channels2, tiles, tiles2)
    sums = tl.zeros_like(base)
    squares = tl.zeros_like(base)
    for start in range(0, tl.maximum(tiles, tiles2) * group_width, BJ):
        entry = start + tl.arange(0, BJ)[:, None]
        t, member = entry // group_width, group[None, :] + entry % group_width
        second = member >= channels
        mask = inside[None, :] & (t < tl.where(second, tiles2, tiles))
        covered = tl.where(second, pixels2, pixels)
        weights = tl.where(mask, tl.minimum(covered, hw - t * covered), 0).to(tl.float32)
        mean = _load_pair(mean_ptr, mean2_ptr, n, t, member, mask, channels, channels2, tiles, tiles2)
        m2 = _load_pair(m2_ptr, m2_2_ptr, n, t, member, mask, channels, channels2, tiles, tiles2)
        distance = mean - base[None, :]
        sums += tl.sum(weights * distance, axis=0)
        squares += tl.sum(m2 + weights * distance * distance, axis=0)
    count = hw * group_width
    offset = sums / count
    a = tl.rsqrt(squares / count - offset * offset + eps)
    b = tl.zeros_like(a)
    if weight_ptr is not None:
        a = a * tl.load(weight_ptr + c, mask=inside).to(tl.float32)
        b += tl.load(bias_ptr + c, mask=inside).to(tl.float32)
    if scale_ptr is not None:
        factor = 1 + tl.load(scale_ptr + n * scale_stride + c, mask=inside).to(tl.float32)
        a = a * factor
        b = b * factor + tl.load(shift_ptr + n * shift_stride + c, mask=inside).to(tl.float32)
    return base + offset, a, b


@triton.jit(do_not_specialize=SIZES)
def _coefficients_kernel(
    out_ptr, mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
    channels, channels2, tiles, tiles2, pixels, pixels2, hw, group_width, eps, scale_stride, shift_stride,
    BC: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """`_coefficients` of every image, (N, 3, C), where there are too many tiles for every program to merge them."""
    width = channels + channels2
    blocks = tl.cdiv(width, BC)
    n, c = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    mean, a, b = _coefficients(
        mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, n, c,
        channels, channels2, tiles, tiles2, pixels, pixels2, hw, group_width, eps, scale_stride, shift_stride, BJ,
    )  # fmt: skip
    out_ptrs = out_ptr + n * 3 * width + c
    tl.store(out_ptrs, mean, mask=c < width)
    tl.store(out_ptrs + width, a, mask=c < width)
    tl.store(out_ptrs + 2 * width, b, mask=c < width)


@triton.jit
def _load_pixels(x_ptrs, x2_ptrs, inside, inside2, limit, start, rows):
    """Pixels of the one of two tensors that a program reads."""
    mask = start + rows < limit
    x = tl.load(x_ptrs, mask=mask & inside, other=0.0)
    if x2_ptrs is not None:
        x += tl.load(x2_ptrs, mask=mask & inside2, other=0.0)
    return x


@triton.jit(do_not_specialize=SIZES)
def _normalise_kernel(
    y_ptr, x_ptr, x2_ptr, coefficients_ptr,
    mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
    channels, channels2, tiles, tiles2, pixels, pixels2, hw, group_width, eps, scale_stride, shift_stride,
    span, image_stride, image_stride2, pixel_stride, pixel_stride2,
    ACTIVATION: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """`span` pixels of one image and BC channels, all of the first tensor or all of the second."""
    width = channels + channels2
    blocks1 = tl.cdiv(channels, BC)
    blocks = blocks1 + tl.cdiv(channels2, BC)
    spans = tl.cdiv(hw, span)
    pid = tl.program_id(0)
    block, n = pid % blocks, (pid // blocks // spans).to(tl.int64)
    first = pid // blocks % spans * span
    stop = tl.minimum(first + span, hw)
    second = block >= blocks1
    own = tl.where(second, block - blocks1, block) * BC + tl.arange(0, BC)  # channel of its tensor
    c = own + tl.where(second, channels, 0)  # channel of y
    in_first, in_second = (
        (own < tl.where(second, 0, channels))[None, :],
        (own < tl.where(second, channels2, 0))[None, :],
    )

    rows = tl.arange(0, BP)[:, None]
    y_ptrs = y_ptr + (n * hw + first) * width + rows * width + c[None, :]
    x_ptrs = x_ptr + n * image_stride + first.to(tl.int64) * pixel_stride + rows * pixel_stride + own[None, :]
    x2_ptrs = x2_ptr
    if x2_ptr is not None:
        x2_ptrs += n * image_stride2 + first.to(tl.int64) * pixel_stride2 + rows * pixel_stride2 + own[None, :]
    x = _load_pixels(x_ptrs, x2_ptrs, in_first, in_second, stop, first, rows)  # on its way while the tiles are merged

    if coefficients_ptr is None:
        mean, a, b = _coefficients(
            mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, n, c,
            channels, channels2, tiles, tiles2, pixels, pixels2, hw, group_width, eps, scale_stride, shift_stride, BJ,
        )  # fmt: skip
    else:
        coefficients = coefficients_ptr + n * 3 * width + c
        mean = tl.load(coefficients, mask=c < width)
        a, b = tl.load(coefficients + width, mask=c < width), tl.load(coefficients + 2 * width, mask=c < width)

    for start in range(first, stop, BP):
        x_ptrs += BP * pixel_stride
        if x2_ptr is not None:
            x2_ptrs += BP * pixel_stride2
        following = _load_pixels(x_ptrs, x2_ptrs, in_first, in_second, stop, start + BP, rows)
        y = activate((x.to(tl.float32) - mean[None, :]) * a[None, :] + b[None, :], ACTIVATION)
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(start + rows < stop) & (in_first | in_second))
        y_ptrs += BP * width
        x = following


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
        _moments_kernel, (n * tiles * triton.cdiv(channels, tiling.channels),),
        mean, m2, x, hw, channels, tiles, pixels, x.stride(0), x.stride(2),
        BP=tiling.pixels, BC=tiling.channels, num_warps=tiling.warps,
    )  # fmt: skip
    return Moments(mean, m2, pixels)


FOLDED_PIXELS, FOLDED_ENTRIES = 256, 64  # of a picture; tiles times channels of a group
PROGRAMS = 2048  # of the normalise pass, at least, where there are blocks of pixels enough


@group_norm.kernel
def _group_norm_triton(
    x, num_groups, weight=None, bias=None, *, eps, activation="none", scale=None, shift=None, moments=None
):
    parts = x if isinstance(x, tuple) else (x,)
    given = _check(parts, num_groups, weight, bias, activation, scale, shift, moments)
    if parts[0].dtype not in DTYPES:
        return None
    parts = [_as_rows(part) for part in parts]
    n, height, width, _ = parts[0].shape
    hw, widths = height * width, [part.shape[-1] for part in parts]
    channels, tiling = sum(widths), _tiling(hw, widths)
    known = [m or _moments(part, tiling) for part, m in zip(parts, given, strict=True)]
    strides = (0, 0) if scale is None else (scale.stride(0), shift.stride(0))
    group_width = channels // num_groups
    tiles = [moments.mean.shape[1] for moments in known]
    inputs = *_pair([m.mean for m in known]), *_pair([m.m2 for m in known]), weight, bias, scale, shift
    sizes = *_pair(widths, 0), *_pair(tiles, 0), *_pair([m.pixels for m in known], 0), hw, group_width, eps, *strides

    coefficients = None
    if hw > FOLDED_PIXELS or max(tiles) * group_width > FOLDED_ENTRIES:
        coefficients = parts[0].new_empty(n, 3, channels, dtype=torch.float32)
        grid = (n * triton.cdiv(channels, 8),)
        launch(_coefficients_kernel, grid, coefficients, *inputs, *sizes, BC=8, BJ=128, num_warps=4)
        inputs = [None] * len(inputs)
    y = parts[0].new_empty(n, height, width, channels)
    blocks = sum(triton.cdiv(width, tiling.channels) for width in widths)
    span = tiling.pixels * min(8, max(1, n * hw * blocks // (tiling.pixels * PROGRAMS)))
    launch(
        _normalise_kernel, (n * triton.cdiv(hw, span) * blocks,),
        y, *_pair(parts), coefficients, *inputs, *sizes,
        span, *_pair([part.stride(0) for part in parts], 0), *_pair([part.stride(2) for part in parts], 0),
        ACTIVATION=activation, BP=tiling.pixels, BC=tiling.channels, BJ=8, num_warps=tiling.warps,
    )  # fmt: skip
    return y


def _pair(values: list, absent=None) -> tuple:
    """What there is of one tensor or of two, as the kernels take it: the second absent, where there is one."""
    return tuple(values) if len(values) == 2 else (values[0], absent)


def _as_rows(x: Tensor) -> Tensor:
    """x (N, H, W, C) with its pixels one stride apart and its channels side by side: itself, or a copy."""
    rows = x.stride(3) == 1 and (x.stride(1) == x.shape[2] * x.stride(2) or x.shape[1] == 1)
    return x if rows else x.contiguous()


def _check(parts, num_groups, weight, bias, activation, scale, shift, moments) -> tuple[Moments | None, ...]:
    """Raises ValueError naming the argument that does not fit; returns the moments of each part."""
    first = parts[0]
    if any(part.ndim != 4 or part.shape[:3] != first.shape[:3] for part in parts):
        raise ValueError(f"x: expected (N, H, W, C), the same N, H and W, got {[tuple(part.shape) for part in parts]}")
    if any(not part.is_floating_point() or part.dtype != first.dtype for part in parts):
        raise ValueError(f"x: expected one float dtype, got {', '.join(str(part.dtype) for part in parts)}")
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
    given = (moments,) if moments is None or isinstance(moments, Moments) else moments
    given = (None,) * len(parts) if moments is None else given
    if len(given) != len(parts):
        raise ValueError(f"moments: {len(given)} for {len(parts)} tensors; give a pair for a pair")
    for part, known in zip(parts, given, strict=True):
        if known is None:
            continue
        shape = (part.shape[0], -(-part.shape[1] * part.shape[2] // known.pixels), part.shape[3])
        if any(tuple(half.shape) != shape or half.dtype != torch.float32 for half in (known.mean, known.m2)):
            raise ValueError(f"moments: expected float32 {shape}, got {known.mean.dtype} {tuple(known.mean.shape)}")
    return given
