"""The torch functions of the references, by oneDNN where it computes on this CPU in this dtype.

oneDNN multiplies matrices in blocks, and each call with an ordinary weight reorders it. A traced forward
(`fastdiff.execution.replaying`) calls the same functions with weights that are reordered once, and gets the same bits.
torch's own matrix products use MKL on x86, which is half as fast on AMD processors, where it does not use AVX-512.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.host.leaves import Leaf

MOST_MEAN = 1.0  # largest |mean| / standard deviation of a group whose variance torch's GroupNorm computes well

_DTYPES: set[torch.dtype] = set()  # which oneDNN computes with on this CPU
if torch.backends.mkldnn.is_available():
    _DTYPES |= {torch.float32} | ({torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set())

Padding = int | tuple[int, int, int, int]


def by_onednn(x: Tensor) -> bool:
    """Whether oneDNN computes with x: float32, or bfloat16 on a CPU that has instructions for it.

    torch.compile gets torch's own functions, which it fuses.
    """
    is_there = x.device.type == "cpu" and x.dtype in _DTYPES and x.numel() > 0
    return is_there and not torch.compiler.is_compiling()


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear of x (..., C_in) and weight (C_out, C_in): (..., C_out)."""
    return _product(x, weight, bias) if by_onednn(x) else F.linear(x, weight, bias)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: Padding,
    upsample: bool,
    added: Tensor | None = None,
) -> Tensor:
    """Return the convolution that `kernels.conv2d` documents, (N, H_out, W_out, C_out), on any device.

    added: (N, H_out, W_out, C_out), added to the output.
    """
    x = x.permute(0, 3, 1, 2)  # a view: NHWC memory is NCHW in torch's channels-last format
    if upsample:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
    if isinstance(padding, tuple):
        x, padding = F.pad(x, padding), 0
    if by_onednn(x):
        return _convolution(x, weight, bias, stride, padding, added)
    y = F.conv2d(x, weight, bias, stride, padding).permute(0, 2, 3, 1)
    return y.contiguous() if added is None else y + added


@Leaf
def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight = weight if weight.is_mkldnn else weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@_product.packs
def _pack_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    rows = x.numel() // x.shape[-1]
    return x, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows), bias


@Leaf
def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, added: Tensor | None
) -> Tensor:
    """Convolve x (N, C_in, H, W) in channels-last memory to (N, H_out, W_out, C_out), contiguous."""
    window = [padding] * 2, [stride] * 2, [1, 1], 1
    if added is None:
        y = torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *window, "none", [], "")
    else:
        added = added.permute(0, 3, 1, 2)
        y = torch.ops.mkldnn._convolution_pointwise.binary(x, added, weight, bias, *window, "add", 1.0, None, [], None)
    return y.permute(0, 2, 3, 1).contiguous()


@_convolution.packs
def _pack_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, *rest: Any) -> Any:
    window = [padding] * 2, [stride] * 2, [1, 1], 1
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *window, list(x.shape))
    return x, packed, bias, stride, padding, *rest


@Leaf
def group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return F.group_norm of pictures x (N, H, W, C), by torch.

    torch computes the variance from sums of squares, which cancel if the mean is large. Such pictures are normalised
    again, without their mean.
    """
    y, mean, rstd = _group_norm(x.contiguous(), num_groups, weight, bias, eps)
    if (mean * rstd).abs().max().item() <= MOST_MEAN:
        return y
    mean = mean.repeat_interleave(x.shape[-1] // num_groups, dim=1)
    return _group_norm(x - mean[:, None, None, :], num_groups, weight, bias, eps)[0].to(x.dtype)


def _group_norm(x: Tensor, num_groups: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of contiguous pictures, and each group's mean and 1 / standard deviation."""
    n, height, width, channels = x.shape
    weight, bias, eps = rest
    x = x.permute(0, 3, 1, 2)
    y, mean, rstd = torch.native_group_norm(x, weight, bias, n, channels, height * width, num_groups, eps)
    return y.permute(0, 2, 3, 1).contiguous(), mean, rstd
