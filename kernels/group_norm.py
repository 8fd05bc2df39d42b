"""GroupNorm fused with a time embedding's scale and shift and an activation, in one read and one write.

Moments are float32: per channel a mean and the sum of squared distances from it (M2), merged over a group by Chan's
formula. Plain sums of squares would cancel on a large mean: torch's own channels-last GroupNorm on the CPU is off by
3e3 at mean 1e3 and deviation 1. Moments are per channel because a group may straddle the seam of a skip connection.

How the moments reach a norm on the GPU::

    conv2d's epilogue computes mean and M2          +- many tiles: merge_kernel -+-> mean, a, b -> apply_kernel -> y
    of each channel and tile of pixels -+           |  merges them into one      |
    (device.conv2d_epilogue)            +- Moments -+                            +-> mean, M2 -+
    otherwise moments_kernel reads x  --+  in the   |                                          |
    to compute them                        Feature  +- few tiles: unchanged -------------------+-> normalise_kernel -> y
                                           of x     (host.moments, models/blocks/layers.py)        merges them, a, b

If one program holds all pixels of a small picture and whole groups, conv2d's epilogue normalises y itself and makes no
Moments.

y is activation(a * (x - mean) + b), with a and b per channel.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.host.calls import PartsCall, check_pictures
from fastdiff.kernels.host.launching import DTYPES, launch, side_by_side
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.host.moments import Moments
from fastdiff.kernels.host.recording import because
from fastdiff.kernels.plans import cpu
from fastdiff.kernels.plans.dispatch import Operation

T = TypeVar("T")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "gelu": F.gelu,
    "relu": lambda x: F.relu(x, inplace=True),
}
# Chosen by timing whole norms on one H200 (docs/measurements/kernels.md); the times of other values were not kept.
FOLDED = 32  # most tiles of a channel, or of its group, that each program of `normalise_kernel` merges by itself
LARGE = 2**23  # elements from which whole groups are merged beforehand even if they have fewer tiles
PROGRAMS = 256  # fewest programs of `normalise_kernel`, if there are enough blocks of pixels


@dataclass(frozen=True, eq=False)
class GroupNormCall(PartsCall[Tensor]):
    """activation(GroupNorm(x) * (1 + scale) + shift) + temb + residual, Wu and He 2018 (arXiv 1803.08494).

    Used in diffusers' ResnetBlock2D and, with temb and residual, in ResidualTemporalBlock1D.

    Args:
        x: (N, H, W, C), float32, float16 or bfloat16; or a pair of such tensors, read as their concatenation over C.
        num_groups: divides C.
        weight, bias: (C,) of any float dtype, both or neither; None for 1 and 0.
        eps: added to the variance.
        activation: none, silu, mish, gelu or relu.
        scale, shift: (N, C) of any float dtype, both or neither; rows may be strided.
        temb: (N, C) of any float dtype, added to every pixel after the activation; rows may be strided.
        residual: (N, H, W, C), the dtype of x, added after the activation.
        moments: the mean and M2 of x, as a pair for a pair. Any that are None are computed.

    Returns:
        (N, H, W, C), contiguous, the dtype of x.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    x: Tensor | tuple[Tensor, Tensor]
    num_groups: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    _: KW_ONLY
    eps: float
    activation: str = "none"
    scale: Tensor | None = None
    shift: Tensor | None = None
    temb: Tensor | None = None
    residual: Tensor | None = None
    moments: Moments | tuple[Moments | None, Moments | None] | None = None

    @property
    def given(self) -> tuple[Moments | None, ...]:
        """The moments of each part."""
        if self.moments is None:
            return (None,) * len(self.parts)
        return (self.moments,) if isinstance(self.moments, Moments) else self.moments

    def check(self) -> None:
        parts, first = self.parts, self.parts[0]
        check_pictures(parts)
        kinds = [(part.dtype, str(part.device)) for part in parts]
        if any(kind != kinds[0] for kind in kinds) or not first.is_floating_point():
            raise ValueError(f"x: expected one float dtype on one device, got {kinds}")
        channels = sum(part.shape[-1] for part in parts)
        if self.num_groups < 1 or channels % self.num_groups:
            raise ValueError(f"num_groups: {self.num_groups} does not divide the {channels} channels of x")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: {self.activation!r} is unknown; use {', '.join(ACTIVATIONS)}")
        self._check_pair(("weight", "bias"), (self.weight, self.bias), (channels,))
        row = (first.shape[0], channels)
        self._check_pair(("scale", "shift"), (self.scale, self.shift), row)
        self._check_tensor("temb", self.temb, row)
        self._check_tensor("residual", self.residual, (*first.shape[:3], channels))
        if self.residual is not None and self.residual.dtype != first.dtype:
            raise ValueError(f"residual: {self.residual.dtype}, but x is {first.dtype}")
        self._check_moments()

    def _check_pair(
        self, names: tuple[str, str], pair: tuple[Tensor | None, Tensor | None], shape: tuple[int, ...]
    ) -> None:
        for name, tensor, other in zip(names, pair, reversed(pair), strict=True):
            if (tensor is None) != (other is None):
                raise ValueError(f"{', '.join(names)}: give both or neither")
            self._check_tensor(name, tensor, shape)

    def _check_tensor(self, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected {shape}, got {tuple(tensor.shape)}")
        if tensor is not None and tensor.device != self.device:
            raise ValueError(f"{name}: on {tensor.device}, but x is on {self.device}")

    def _check_moments(self) -> None:
        parts, given = self.parts, self.given
        if len(given) != len(parts):
            raise ValueError(f"moments: {len(given)} for {len(parts)} tensors; give a pair for a pair")
        for part, known in zip(parts, given, strict=True):
            if known is not None:
                shape = (part.shape[0], -(-part.shape[1] * part.shape[2] // known.pixels), part.shape[3])
                if any(tuple(half.shape) != shape or half.dtype != torch.float32 for half in (known.mean, known.m2)):
                    got = f"{known.mean.dtype} {tuple(known.mean.shape)}"
                    raise ValueError(f"moments: expected float32 {shape}, got {got}")

    def reference(self) -> Tensor:
        by_torch = cpu.by_onednn(self.parts[0]) and self.given == (None,) * len(self.parts)
        y = ACTIVATIONS[self.activation](self._by_torch() if by_torch else self._by_moments())
        if self.temb is not None:
            y += self.temb[:, None, None, :]
        if self.residual is not None:
            y += self.residual
        return y.to(self.parts[0].dtype)

    def _by_torch(self) -> Tensor:
        """Return the scaled and shifted norm, by torch's own GroupNorm."""
        x, pair = _side_by_side(self.parts), (self.weight, self.bias)
        weight, bias = (None if each is None else each.float() for each in pair)
        if self.scale is None or self.shift is None:
            return cpu.group_norm(x, self.num_groups, weight, bias, self.eps)
        a, b = 1 + self.scale.float(), self.shift.float()
        if len(x) == 1:  # one affine map does both
            weight = a[0] if weight is None else weight * a[0]
            bias = b[0] if bias is None else torch.addcmul(b[0], bias, a[0])
            return cpu.group_norm(x, self.num_groups, weight, bias, self.eps)
        y = cpu.group_norm(x, self.num_groups, weight, bias, self.eps)
        return torch.addcmul(b[:, None, None, :], y, a[:, None, None, :])

    def _by_moments(self) -> Tensor:
        """Return the scaled and shifted norm in float32."""
        parts, hw = self.parts, self.parts[0].shape[1] * self.parts[0].shape[2]
        merged = [
            _channel_moments(part.float()) if known is None else _merge(part.float(), known)
            for part, known in zip(parts, self.given, strict=True)
        ]
        centred, *moments = zip(*merged, strict=True)
        mean, m2 = map(_side_by_side, moments)  # (N, C)
        a, b = _affine(mean, m2, hw, self.num_groups, self.weight, self.bias, self.eps)
        if self.scale is not None and self.shift is not None:
            a, b = a * (1 + self.scale.float()), torch.addcmul(self.shift.float(), b, 1 + self.scale.float())
        return _apply(centred, a, b)

    def obstacle(self) -> str | None:
        dtype = self.parts[0].dtype
        return None if dtype in DTYPES else f"no kernel for {dtype}"

    def kernel(self) -> Tensor:
        given = self.given
        because("computes its own moments" if None in given else "moments from the convolution")
        parts = [_as_rows(part) for part in self.parts]
        n, height, width, _ = parts[0].shape
        hw, widths = height * width, [part.shape[-1] for part in parts]
        known = [m or _make_moments(part, _tiling(hw, widths)) for part, m in zip(parts, given, strict=True)]
        y = parts[0].new_empty(n, height, width, sum(widths))
        group_width = y.shape[-1] // self.num_groups
        whole = _whole_groups(group_width, widths)
        tiles = max(m.mean.shape[1] for m in known)
        affine = affine_arguments(self)
        entries = tiles * (1 if whole else group_width)
        if entries > FOLDED and (whole or tiles > 1):  # a merge of one tile would only copy
            rows, columns = (256, 8) if tiles > 64 else (64, 16)
            merged = _merge_tiles(known, hw, affine, whole, rows=rows, columns=max(columns, whole), tree=False)
        elif whole and y.numel() >= LARGE:
            merged = _merge_tiles(known, hw, affine, whole, rows=_rows(tiles, whole), columns=128, tree=True)
        else:
            return _normalise(y, parts, self, known, affine, whole, group_width)
        if whole:
            return _apply_merged(y, parts, self, merged)
        known = [Moments(merged[0][:, None], merged[1][:, None], hw)]
        return _normalise(y, parts, self, known, affine, whole, group_width)


group_norm = Operation("group_norm", GroupNormCall)


def _channel_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (N, H, W, C) minus each channel's mean; that mean and M2, each (N, C)."""
    mean = x.mean(dim=(1, 2))
    centred = x - mean[:, None, None, :]
    return centred, mean, centred.square().sum(dim=(1, 2))


def _merge(x: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `_channel_moments`, computed from the moments of tiles of x."""
    hw = x.shape[1] * x.shape[2]
    starts = torch.arange(moments.mean.shape[1], device=moments.mean.device) * moments.pixels
    counts = (hw - starts).clamp(max=moments.pixels).to(torch.float32)[:, None]  # (tiles, 1)
    mean = (counts * moments.mean).sum(dim=1) / hw
    m2 = (moments.m2 + counts * (moments.mean - mean[:, None]).square()).sum(dim=1)
    return x - mean[:, None, None, :], mean, m2


def _side_by_side(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)


def _affine(
    mean: Tensor, m2: Tensor, pixels: int, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return a and b, each (N, C), with GroupNorm(x) = a * (x - mean) + b for each channel's own mean."""
    n, channels = mean.shape
    means = mean.view(n, num_groups, -1)  # (N, G, C / G)
    offsets = means - means.mean(dim=-1, keepdim=True)
    variance = (m2.view_as(means) / pixels + offsets.square()).mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    a, b = rstd.expand_as(means).reshape(n, channels), (offsets * rstd).view(n, channels)
    if weight is not None and bias is not None:
        a, b = a * weight.float(), torch.addcmul(bias.float(), b, weight.float())
    return a, b


def _apply(centred: tuple[Tensor, ...], a: Tensor, b: Tensor) -> Tensor:
    """Return a * centred + b, (N, H, W, C); in place if there is a single tensor."""
    a, b = a[:, None, None, :], b[:, None, None, :]
    if len(centred) == 1:
        return torch.addcmul(b, centred[0], a, out=centred[0])
    widths = [part.shape[-1] for part in centred]
    y = centred[0].new_empty(*centred[0].shape[:3], sum(widths))
    for part, out, scale, shift in zip(centred, *(each.split(widths, dim=-1) for each in (y, a, b)), strict=True):
        torch.addcmul(shift, part, scale, out=out)
    return y


class NormTiling(NamedTuple):
    """Tile sizes. They fix the order of every sum, so they depend only on the picture's shape and dtype."""

    channels: int  # per program
    pixels: int  # per step of a program's loop
    warps: int


def _tiling(hw: int, widths: list[int], blocks: tuple[int, ...] = (64, 32)) -> NormTiling:
    # the block that wastes the fewest lanes; of equals the widest, to read whole cache lines
    waste = {block: sum(-width % block for width in widths) for block in blocks}
    return NormTiling(min(waste, key=waste.__getitem__), min(32, triton.next_power_of_2(hw)), 4)


def _make_moments(x: Tensor, tiling: NormTiling) -> Moments:
    from fastdiff.kernels.device.group_norm import moments_kernel  # imports Triton

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


def _moments_arguments(known: list[Moments]) -> dict[str, Any]:
    """Return the moments of a tensor or a pair as kernel arguments."""
    moments, moments2 = _pair([(m.mean, m.m2) for m in known], (None, None))
    tiles, tiles2 = _pair([m.mean.shape[1] for m in known], 0)
    pixels, pixels2 = _pair([m.pixels for m in known], 0)
    return dict(moments=moments, moments2=moments2, tiles=tiles, tiles2=tiles2, pixels=pixels, pixels2=pixels2)


def affine_arguments(call: GroupNormCall) -> dict[str, Any]:
    """Return the weight, bias, scale, shift and eps of a norm as kernel arguments."""
    scale, shift = side_by_side(call.scale), side_by_side(call.shift)
    return dict(
        norm=(call.weight, call.bias, scale, shift, call.eps),
        scale_stride=0 if scale is None else scale.stride(0),
        shift_stride=0 if shift is None else shift.stride(0),
    )


def after_arguments(call: GroupNormCall) -> dict[str, Any]:
    """Return temb and residual, which are added after a norm's activation, as kernel arguments."""
    temb, residual = side_by_side(call.temb), None if call.residual is None else call.residual.contiguous()
    return dict(temb=temb, residual=residual, temb_stride=0 if temb is None else temb.stride(0))


def _rows(entries: int, whole: int) -> int:
    """Return how many entries `normalise_kernel` merges at a time: tiles, or (tile, channel) pairs of a group."""
    return 4 if entries <= 4 else 16 if whole else 8


def _merge_tiles(
    known: list[Moments], hw: int, affine: dict[str, Any], whole: int, *, rows: int, columns: int, tree: bool
) -> Tensor:
    """Merge all tiles of a picture: return (2, N, C), mean and M2; for whole groups (3, N, C), mean, a and b."""
    from fastdiff.kernels.device.group_norm import merge_kernel  # imports Triton

    n, widths = len(known[0].mean), [m.mean.shape[2] for m in known]
    merged = known[0].mean.new_empty(3 if whole else 2, n, sum(widths))
    mean, m2, b = merged if whole else (*merged, None)
    launch(
        merge_kernel, (n * sum(triton.cdiv(width, columns) for width in widths),),
        mean, m2, b, channels=widths[0], channels2=sum(widths[1:]), hw=hw, **_moments_arguments(known), **affine,
        WHOLE=whole, TREE=tree, BT=rows, BC=columns, num_warps=1 if tree else 4, fp_fusion=False,
    )  # fmt: skip
    return merged


def _tensor_arguments(parts: list[Tensor]) -> dict[str, Any]:
    """Return a tensor or a pair as kernel arguments."""
    x, x2 = _pair([(part, part.stride(0), part.stride(2)) for part in parts], (None, None, None))
    channels, channels2 = _pair([part.shape[-1] for part in parts], 0)
    return dict(x=x, x2=x2, channels=channels, channels2=channels2, hw=parts[0].shape[1] * parts[0].shape[2])


def _apply_merged(y: Tensor, parts: list[Tensor], call: GroupNormCall, merged: Tensor) -> Tensor:
    from fastdiff.kernels.device.group_norm import apply_kernel  # imports Triton

    mean, a, b = merged  # each (N, C)
    widths = [part.shape[-1] for part in parts]
    tiling = _tiling(y.shape[1] * y.shape[2], widths, (128, 64, 32))
    blocks = len(y) * sum(triton.cdiv(width, tiling.channels) for width in widths)
    launch(
        apply_kernel, (blocks * triton.cdiv(y.shape[1] * y.shape[2], tiling.pixels),),
        y, mean_ptr=mean, a_ptr=a, b_ptr=b, **_tensor_arguments(parts), **after_arguments(call),
        ACTIVATION=call.activation, BP=tiling.pixels, BC=tiling.channels, num_warps=tiling.warps, fp_fusion=False,
    )  # fmt: skip
    return y


def _normalise(
    y: Tensor, parts: list[Tensor], call: GroupNormCall, known: list[Moments], affine: dict[str, Any], whole: int,
    group_width: int,
) -> Tensor:  # fmt: skip
    from fastdiff.kernels.device.group_norm import normalise_kernel  # imports Triton

    hw, widths, merged = y.shape[1] * y.shape[2], [p.shape[-1] for p in parts], [m.mean.shape[2] for m in known]
    tiling, entries = _tiling(hw, widths), max(m.mean.shape[1] for m in known) * (1 if whole else group_width)
    blocks = len(y) * sum(triton.cdiv(width, tiling.channels) for width in widths)
    # several blocks of pixels share a merge if that leaves enough programs
    most = 16 if entries > 4 else 8
    span = tiling.pixels * min(most, max(1, blocks * triton.cdiv(hw, tiling.pixels) // PROGRAMS))
    launch(
        normalise_kernel, (blocks * triton.cdiv(hw, span),),
        y, **_tensor_arguments(parts), **_moments_arguments(known), **affine, **after_arguments(call),
        merged=merged[0], merged2=sum(merged[1:]), group_width=group_width, span=span, ACTIVATION=call.activation,
        WHOLE=whole, BP=tiling.pixels, BC=tiling.channels, BJ=_rows(entries, whole), num_warps=tiling.warps,
        fp_fusion=False,
    )  # fmt: skip
    return y


def _whole_groups(group_width: int, widths: list[int]) -> int:
    """Return the group width if whole groups fill each program's channels, else 0."""
    return group_width if 32 % group_width == 0 and all(width % group_width == 0 for width in widths) else 0


def _pair(values: list[T], absent: Any) -> tuple[T, Any]:
    """Return the values of a tensor and of a second one, or `absent` if there is no second."""
    return values[0], values[1] if len(values) == 2 else absent


def _as_rows(x: Tensor) -> Tensor:
    """Return x (N, H, W, C) with one stride between pixels and contiguous channels; a copy only if necessary."""
    rows = x.stride(3) == 1 and (x.stride(1) == x.shape[2] * x.stride(2) or x.shape[1] == 1)
    return x if rows else x.contiguous()
