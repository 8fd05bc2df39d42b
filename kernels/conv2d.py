"""2-D convolution with the epilogue of a U-Net block: bias, time embedding, residual.

A channels-last implicit GEMM in the making: the nearest 2x upsample before it and a skip connection read from two
tensors are part of the operation, so that neither is ever materialised.
"""

import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels._dispatch import Operation

Padding = int | tuple[int, int, int, int]  # one width for all sides, or (left, right, top, bottom)


@Operation
def conv2d(
    x: Tensor | tuple[Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: Padding = 0,
    upsample: bool = False,
    temb: Tensor | None = None,
    residual: Tensor | None = None,
    output_scale: float = 1.0,
) -> Tensor:
    """(conv(x) + bias + temb + residual) / output_scale, as diffusers' ResnetBlock2D, Upsample2D, Downsample2D.

    Args:
        x: (N, H, W, C_in), float32, float16 or bfloat16; or a pair of such tensors, read as their concatenation over C.
        weight: (C_out, C_in, kH, kW), the dtype of x; fastest when its memory format is channels-last.
        bias: (C_out,).
        stride: 1 or 2.
        padding: zeros around the picture.
        upsample: repeat each pixel of x 2 x 2 before the convolution (nearest).
        temb: (N, C_out), added to every pixel.
        residual: (N, H_out, W_out, C_out).
        output_scale: divides the sum.

    Returns: (N, H_out, W_out, C_out), contiguous, the dtype of x.
    """
    _check(x, weight, residual)
    if isinstance(x, tuple):
        first = x[0].shape[-1]
        partial = _convolve(x[0], weight[:, :first], bias, stride, padding, upsample)
        y = partial.add_(_convolve(x[1], weight[:, first:], None, stride, padding, upsample))
    else:
        y = _convolve(x, weight, bias, stride, padding, upsample)
    if temb is not None:
        y += temb[:, None, None, :]
    if residual is not None:
        y += residual
    return y if output_scale == 1.0 else y.div_(output_scale)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: Padding, upsample: bool) -> Tensor:
    if weight.shape[2:] == (1, 1) and stride == 1 and padding == 0 and not upsample:
        return F.linear(x, weight.flatten(1), bias)
    x = x.permute(0, 3, 1, 2)  # a view: NHWC memory is NCHW in torch's channels-last format
    if upsample:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
    if isinstance(padding, tuple):
        x, padding = F.pad(x, padding), 0
    return F.conv2d(x, weight, bias, stride, padding).permute(0, 2, 3, 1).contiguous()


def _check(x: Tensor | tuple[Tensor, Tensor], weight: Tensor, residual: Tensor | None) -> None:
    parts = x if isinstance(x, tuple) else (x,)
    if any(part.ndim != 4 for part in parts):
        raise ValueError(f"x: expected (N, H, W, C), got {[tuple(part.shape) for part in parts]}")
    channels = sum(part.shape[-1] for part in parts)
    if weight.ndim != 4 or weight.shape[1] != channels:
        raise ValueError(f"weight: expected (C_out, {channels}, kH, kW), got {tuple(weight.shape)}")
    for name, tensor in (("weight", weight), ("residual", residual), ("x", parts[-1])):
        if tensor is not None and (tensor.dtype, tensor.device) != (parts[0].dtype, parts[0].device):
            raise ValueError(
                f"{name}: {tensor.dtype} on {tensor.device}, but x is {parts[0].dtype} on {parts[0].device}"
            )
