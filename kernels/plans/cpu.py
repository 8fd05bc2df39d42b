"""The torch functions of the references, by oneDNN where it computes on this CPU in this dtype.

oneDNN multiplies matrices in blocks, and each call with an ordinary weight reorders it. A traced forward
(`fastdiff.execution.replaying`) calls the same functions with weights that are reordered once, and gets the same bits.
torch's own matrix products use MKL on x86, which is half as fast on AMD processors, where it does not use AVX-512.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.host.leaves import Leaf

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {  # of linear layers
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}
POST_OPS = {None: ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}
MOST_MEAN = 1.0  # largest |mean| / standard deviation of a group whose variance torch's GroupNorm computes well

_DTYPES: set[torch.dtype] = set()  # which oneDNN computes with on this CPU
if torch.backends.mkldnn.is_available():
    _DTYPES |= {torch.float32} | ({torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set())
    # Calls of an overload skip torch's search for it, which takes a few microseconds.
    _LINEAR, _CONVOLUTION = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._convolution_pointwise

Padding = int | tuple[int, int, int, int]


def by_onednn(x: Tensor) -> bool:
    """Whether oneDNN computes with x: float32, or bfloat16 on a CPU that has instructions for it.

    torch.compile gets torch's own functions, which it fuses.
    """
    is_there = x.device.type == "cpu" and x.dtype in _DTYPES and x.numel() > 0
    return is_there and not torch.compiler.is_compiling()


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, added: Tensor | None = None
) -> Tensor:
    """Return activation(F.linear(x, weight, bias)) + added, (..., C_out), for x (..., C_in), on any device.

    oneDNN applies an activation or adds a tensor before it stores a sum, but not both.
    """
    if by_onednn(x) and activation in POST_OPS:
        if activation is None:
            return _product(x, weight, bias, None, added)
        y = _product(x, weight, bias, activation)
    else:
        y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return y if added is None else y + added


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, activation2: str | None) -> Tensor:
    """Return activation(x W1^T + b1) * activation2(x W2^T + b2). W1 and W2 are the halves of weight (2 C_out, C_in).

    One of the activations is None.
    """
    if not by_onednn(x):
        first, second = F.linear(x, weight, bias).chunk(2, dim=-1)
        return ACTIVATIONS[activation](first) * ACTIVATIONS[activation2](second)
    biases = (None, None) if bias is None else bias.chunk(2)
    plain, gate = zip(weight.chunk(2), biases, strict=True)
    if activation is not None:
        plain, gate, activation2 = gate, plain, activation
    return _product(x, *plain, None, _product(x, *gate, activation2), "mul")


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
    if weight.shape[2:] == (1, 1) and (stride, padding, upsample) == (1, 0, False) and by_onednn(x):
        return product(x, weight.flatten(1), bias, added=added)  # it starts sooner than a convolution
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
def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    other: Tensor | None = None,
    by: str = "add",
) -> Tensor:
    """Return activation(x weight^T + bias); or without an activation, the sum or product with `other`."""
    weight = weight if weight.is_mkldnn else weight.contiguous()
    if other is not None:
        return _LINEAR.binary(x, other, weight, bias, by)
    name, algorithm = POST_OPS[activation]
    return _LINEAR.default(x, weight, bias, name, [], algorithm)


@_product.packs
def _pack_product(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    rows = x.numel() // x.shape[-1]
    return x, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows), *rest


@Leaf
def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, added: Tensor | None
) -> Tensor:
    """Convolve x (N, C_in, H, W) in channels-last memory to (N, H_out, W_out, C_out), contiguous."""
    window = [padding] * 2, [stride] * 2, [1, 1], 1
    if added is None:
        y = _CONVOLUTION.default(x, weight, bias, *window, "none", [], "")
    else:
        added = added.permute(0, 3, 1, 2)
        y = _CONVOLUTION.binary(x, added, weight, bias, *window, "add", 1.0, None, [], None)
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
    again, without their mean. The others in the batch keep their bits.
    """
    y, mean, rstd = _group_norm(x.contiguous(), num_groups, weight, bias, eps)
    sizes = mean * rstd
    if not torch.linalg.vector_norm(sizes, torch.inf).item() <= MOST_MEAN:  # NaN is not accurate either
        again = ~(sizes.abs().amax(dim=1) <= MOST_MEAN)
        mean = mean.repeat_interleave(x.shape[-1] // num_groups, dim=1)[:, None, None, :]
        y[again] = _group_norm(x[again] - mean[again], num_groups, weight, bias, eps)[0].to(x.dtype)
    return y


def _group_norm(x: Tensor, num_groups: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of contiguous pictures, and each group's mean and 1 / standard deviation."""
    n, height, width, channels = x.shape
    weight, bias, eps = rest
    x = x.permute(0, 3, 1, 2)
    y, mean, rstd = torch.native_group_norm(x, weight, bias, n, channels, height * width, num_groups, eps)
    return y.permute(0, 2, 3, 1).contiguous(), mean, rstd
