"""Weights as kernels read them: the memory layout of a convolution's weight, and 8-bit weights and activations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

INT8, FP8 = torch.int8, torch.float8_e4m3fn
MOST = {INT8: 127.0, FP8: torch.finfo(FP8).max}  # the largest magnitude of each 8-bit format
NAMES = {INT8: "int8", FP8: "fp8"}


class Quantised(nn.Module):
    """An 8-bit weight: values, and a scale for each output channel; their product is the weight.

    `linear`, `swiglu`, `geglu`, `conv2d` and a layer's `weight` take it in place of a tensor. A kernel multiplies x by
    the values and the sum by the scale; a reference implementation multiplies by `dequantised`. int8 values are exact
    in every dtype of x. e4m3 values need x in e4m3, which `kernels.to_fp8` makes.

    Args:
        values: int8 or float8_e4m3fn, (C_out, ...), laid out like the weight.
        scale: float32, (C_out,); for stacked weights (parts, C_out, ...) it is (parts, C_out).

    Raises:
        ValueError: the dtypes or shapes do not fit.
    """

    def __init__(self, values: Tensor, scale: Tensor):
        super().__init__()
        if values.dtype not in MOST or scale.dtype != torch.float32:
            raise ValueError(
                f"values, scale: expected int8 or float8_e4m3fn, and float32, got {values.dtype} and {scale.dtype}"
            )
        if not 0 < scale.ndim < values.ndim or values.shape[: scale.ndim] != scale.shape:
            raise ValueError(f"scale: {tuple(scale.shape)} does not fit values {tuple(values.shape)}")
        self.values = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def flatten(self, start: int) -> "Quantised":
        """Return the same weight with the dimensions from `start` on, not the first, flattened."""
        return Quantised(self.values.flatten(start), self.scale)

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "Quantised":
        """Return the same weight with a dimension unflattened; unflattening the first gives stacked weights."""
        scale = self.scale.unflatten(0, sizes) if dim == 0 else self.scale
        return Quantised(self.values.unflatten(dim, sizes), scale)

    def unbind(self) -> "list[Quantised]":
        """Return the stacked weights as a list."""
        return [Quantised(*each) for each in zip(self.values, self.scale, strict=True)]

    def on_meta(self) -> "Quantised":
        """Return a copy on the meta device, without memory."""
        return Quantised(self.values.to("meta"), self.scale.to("meta"))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, rounded once to `dtype`."""
        return _times(self.values, self.scale).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "Quantised":
        """Apply `fn`, as `to()` does, to integer views of the tensors, so they keep their dtypes."""

        def move(tensor: Tensor) -> Tensor:
            whole = torch.int8 if tensor.itemsize == 1 else torch.int32
            return fn(tensor.view(whole)).view(tensor.dtype)

        return super()._apply(move, *args, **kwargs)


Weight = Tensor | Quantised


@dataclass(frozen=True, eq=False)
class Scaled:
    """8-bit activations with their scales, as `kernels.to_fp8` makes them."""

    values: Tensor  # float8_e4m3fn, contiguous: tokens (N, L, C) or pictures (N, H, W, C)
    scale: Tensor  # float32, (N, L) for tokens, (N,) for pictures
    dtype: torch.dtype  # of the tensor before quantisation

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def on_meta(self) -> "Scaled":
        """Return a copy on the meta device, without memory."""
        return Scaled(self.values.to("meta"), self.scale.to("meta"), self.dtype)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the activations, rounded once to `dtype`."""
        return _times(self.values, self.scale).to(dtype)


class Factors(NamedTuple):
    """Tokens and a weight as kernels multiply them; 8-bit ones come with the scales of their rows."""

    x: Tensor  # (N, L, C_in)
    weight: Tensor  # (..., C_out, C_in)
    x_scale: Tensor | None  # (N, L)
    scale: Tensor | None  # (..., C_out)


def format_of(weight: Weight) -> str | None:
    """Return the format name of an 8-bit weight, or None for any other."""
    return NAMES[weight.dtype] if isinstance(weight, Quantised) else None


def _times(values: Tensor, scale: Tensor) -> Tensor:
    """Return values, `(*scale.shape, ...)`, in float32, each times its scale."""
    return values.float() * scale.reshape(*scale.shape, *(1,) * (values.ndim - scale.ndim))


def quantise(weight: Tensor, dtype: torch.dtype) -> Quantised:
    """Return a weight (C_out, ...) in int8 or e4m3, scaled per channel by its largest magnitude, rounded to nearest.

    A channel of zeros stays zero. A channel with NaN or infinity gets such a scale, and its products are NaN.
    """
    flat, most = weight.float().flatten(1), MOST[dtype]
    scale = flat.abs().amax(dim=1) / most if flat.shape[1] else flat.new_zeros(len(flat))
    values = (weight.float() / scale.reshape(-1, *(1,) * (weight.ndim - 1))).nan_to_num_(0, most, -most)
    values = values.clamp_(-most, most)
    return Quantised((values if dtype == FP8 else values.round_()).to(dtype), scale)


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight as torch's own functions take it; `dtype` is the dtype of the tensor it multiplies."""
    return weight.dequantised(dtype) if isinstance(weight, Quantised) else weight


def k_first(weight: Tensor) -> Tensor:
    """Return the weight (C_out, C_in, kH, kW) with memory order (kH, kW, C_in, C_out), the kernel's fastest in float32.

    float32 products read operands from shared memory. With this order a warp's output channels are adjacent there.
    """
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


class Filters(NamedTuple):
    """A convolution's weight in its memory order."""

    values: Tensor  # (C_out, kH, kW, C_in)
    is_k_first: bool = False  # whether it is (kH, kW, C_in, C_out) instead, the order of `k_first`
    scale: Tensor | None = None  # (C_out,), for an 8-bit weight


def weight_memory(weight: Weight) -> Filters:
    """Return the weight in its memory order; if that is neither of the two, a copy in the first."""
    if isinstance(weight, Quantised):
        return Filters(weight.values.permute(0, 2, 3, 1).contiguous(), scale=weight.scale)
    filters, turned = weight.permute(0, 2, 3, 1), weight.permute(2, 3, 1, 0)
    if weight.dtype == torch.float32 and turned.is_contiguous() and not filters.is_contiguous():
        return Filters(turned, is_k_first=True)
    return Filters(filters.contiguous())
