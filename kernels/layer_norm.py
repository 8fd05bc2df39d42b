"""LayerNorm and RMSNorm of tokens in one pass, with the residual add before and the scale and shift of adaLN after.

A program holds its tokens in registers and reads them once: the mean, then the squared distances from it, both float32.
Sums of squares would cancel on a large mean.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels._dispatch import Operation


@Operation
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    rms: bool = False,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """norm(x + residual) * (1 + scale) + shift: LayerNorm (Ba et al. 2016, arXiv 1607.06450), or RMSNorm (Zhang and
    Sennrich 2019, arXiv 1910.07467); with scale and shift diffusers' AdaLayerNormZero.

    Args:
        x: (N, L, C), float32, float16 or bfloat16; tokens may be strided.
        weight, bias: (C,) of any float dtype; None for 1 and 0. RMSNorm has no bias.
        eps: added to the variance, or to the mean square.
        rms: RMSNorm: no mean is subtracted.
        residual: (N, L, C), the dtype of x; the sum, rounded to that dtype, is what is normalised.
        scale, shift: (N, C) of any float dtype, both or neither; rows may be strided (columns of a wider table).

    Returns: y (N, L, C), contiguous, the dtype of x; with `residual`, (y, x + residual). Raises ValueError naming the
        argument that does not fit.
    """
    _check(x, weight, bias, rms, residual, scale, shift)
    total = x if residual is None else x + residual
    rows = total.float()
    parameters = [None if tensor is None else tensor.float() for tensor in (weight, bias)]
    if rms:
        y = F.rms_norm(rows, rows.shape[-1:], parameters[0], eps)
    else:
        y = F.layer_norm(rows, rows.shape[-1:], *parameters, eps)
    if scale is not None and shift is not None:
        y = torch.addcmul(shift.float()[:, None], y, 1 + scale.float()[:, None])
    y = y.to(x.dtype)
    return y if residual is None else (y, total)


def _check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rms: bool,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
) -> None:
    if x.ndim != 3 or not x.is_floating_point() or x.shape[-1] < 1:
        raise ValueError(f"x: expected floats (N, L, C), got {x.dtype} {tuple(x.shape)}")
    if rms and bias is not None:
        raise ValueError("bias: RMSNorm has none")
    if (scale is None) != (shift is None):
        raise ValueError("scale, shift: give both or neither")
    row, table = (x.shape[2],), (x.shape[0], x.shape[2])
    shapes = {"weight": row, "bias": row, "residual": tuple(x.shape), "scale": table, "shift": table}
    tensors = {"weight": weight, "bias": bias, "residual": residual, "scale": scale, "shift": shift}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{name}: expected {shapes[name]}, got {tuple(tensor.shape)}")
        if tensor.device != x.device or not tensor.is_floating_point():
            raise ValueError(f"{name}: {tensor.dtype} on {tensor.device}, but x is {x.dtype} on {x.device}")
    if residual is not None and residual.dtype != x.dtype:
        raise ValueError(f"residual: {residual.dtype}, but x is {x.dtype}")
