"""Faster torch functions for the CPU references, for models that ask for them.

They round differently from the usual functions, so a model must ask with `fast_on_cpu`. Models that were released
before these functions do not ask, and keep their bits. All are for float32; `choices` says when each one is used.

oneDNN computes products and convolutions here. torch itself uses BLAS for products, and for convolutions with few
elements. On x86 its BLAS is MKL, which is half as fast on AMD processors, where it does not use AVX-512.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.plans.choices import CHOICES

MOST_MEAN = 4.0  # largest |mean| / standard deviation of a group for which torch's GroupNorm is as accurate as ours

_wanted: ContextVar[bool] = ContextVar("fast_on_cpu", default=False)


@contextmanager
def fast_on_cpu() -> Iterator[None]:
    """Run references with the functions of this module, inside the block or the decorated function."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def _takes(x: Tensor) -> bool:
    """Whether the model asks for these functions, and they support x."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and _wanted.get()  # last: dynamo cannot trace it


def _way(operation: str, x: Tensor, **sizes: int | bool) -> str:
    """Return the way of a reference on x from the table of choices; "torch" if no row matches.

    torch.compile traces this function, so it must not use a cache.
    """
    if x.device.type != "cpu":
        return "torch"
    facts = sizes | {"by_onednn": _takes(x) and torch.backends.mkldnn.is_available()}
    return next((row.way for row in CHOICES.of[operation] if row.fits(facts)), "torch")


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear of x (..., C_in) and weight (C_out, C_in): (..., C_out)."""
    if _way("product", x, multiplications=x.numel() * len(weight)) == "torch":
        return F.linear(x, weight, bias)
    pixels = x.reshape(1, 1, -1, x.shape[-1])
    return convolution(pixels, weight[:, :, None, None], bias).view(*x.shape[:-1], len(weight))


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0) -> Tensor:
    """Return F.conv2d of pictures x (N, H, W, C_in): (N, H, W, C_out), contiguous."""
    y = torch.mkldnn_convolution(x.permute(0, 3, 1, 2), weight, bias, (padding, padding), (stride, stride), (1, 1), 1)
    return y.permute(0, 2, 3, 1).contiguous()


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int | tuple[int, int, int, int],
    upsample: bool,
) -> Tensor:
    """Return the convolution that `kernels.conv2d` documents, (N, H_out, W_out, C_out), on any device."""
    if weight.shape[2:] == (1, 1) and stride == 1 and padding == 0 and not upsample:
        return product(x, weight.flatten(1), bias)
    way = _way("convolution", x, elements=x.numel(), upsample=upsample)
    if way == "patches":
        return _convolve_patches(x, weight, bias, stride, padding)
    x = x.permute(0, 3, 1, 2)  # a view: NHWC memory is NCHW in torch's channels-last format
    if upsample:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
    if isinstance(padding, tuple):
        x, padding = F.pad(x, padding), 0
    if way == "onednn":
        return convolution(x.permute(0, 2, 3, 1), weight, bias, stride, padding)
    return F.conv2d(x, weight, bias, stride, padding).permute(0, 2, 3, 1).contiguous()


def _convolve_patches(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int | tuple[int, int, int, int]
) -> Tensor:
    """Convolve by one matrix product over the patches of x, each (kH, kW, C_in)."""
    left, right, top, bottom = (padding,) * 4 if isinstance(padding, int) else padding
    x = F.pad(x, (0, 0, left, right, top, bottom))
    patches = x.unfold(1, weight.shape[2], stride).unfold(2, weight.shape[3], stride)  # (N, H, W, C_in, kH, kW)
    return F.linear(patches.permute(0, 1, 2, 4, 5, 3).flatten(3), weight.permute(0, 2, 3, 1).flatten(1), bias)


def normalises(x: Tensor, *, plain: bool) -> bool:
    """Whether `normalised` supports x.

    Args:
        plain: whether nothing but the norm's own weight and bias is applied or given.
    """
    return _takes(x) and any(row.fits({"plain": plain}) for row in CHOICES.of["normalisation"])


def normalised(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """Return F.group_norm of pictures x (N, H, W, C), contiguous; None where it would be inaccurate.

    torch computes the variance from sums of squares, which cancel if the mean is large.
    """
    n, height, width, channels = x.shape
    y, mean, rstd = torch.native_group_norm(
        x.permute(0, 3, 1, 2), weight, bias, n, channels, height * width, num_groups, eps
    )
    if (mean * rstd).abs().max().item() <= MOST_MEAN:
        return y.permute(0, 2, 3, 1).contiguous()
    return None
