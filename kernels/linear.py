"""Linear layers of tokens with what transformers do around them: RMSNorm before, activation, gate and residual after.

One matrix product and one epilogue; the normalised, the activated and the gated tokens are never written.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels._dispatch import Operation
from fastdiff.kernels.layer_norm import layer_norm

ACTIVATIONS = {None: lambda x: x, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu}


@Operation
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    rms_norm: tuple[Tensor | None, float] | None = None,
) -> Tensor:
    """activation(x weight^T + bias) * gate + residual, as the projections of diffusers' BasicTransformerBlock.

    Args:
        x: (N, L, C_in), float32, float16 or bfloat16; tokens may be strided.
        weight: (C_out, C_in), the dtype of x. Q, K and V are one linear of 3 C rows, which attention reads in place.
        bias: (C_out,), the dtype of x.
        activation: None, gelu (by erf), gelu_tanh or silu.
        gate: (N, C_out) of any float dtype, one row for all tokens of a picture: adaLN-Zero (Peebles and Xie 2022,
            arXiv 2212.09748); rows may be strided (columns of a wider table).
        residual: (N, L, C_out), the dtype of x.
        rms_norm: (weight (C_in,) or None, eps): x is RMS-normalised first (Zhang and Sennrich 2019, arXiv 1910.07467).
            The mean square is summed while x streams through, and scales the product at the end.

    Returns: (N, L, C_out), contiguous, the dtype of x. Raises ValueError naming the argument that does not fit.
    """
    check(x, weight, bias, activation, gate, residual, rms_norm)
    if rms_norm is not None:
        x = layer_norm.reference(x, rms_norm[0], eps=rms_norm[1], rms=True)
    y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    if gate is not None:
        y = y * gate[:, None].to(y.dtype)
    return y if residual is None else y + residual


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    rms_norm: tuple[Tensor | None, float] | None = None,
) -> None:
    """Raises ValueError naming the argument that does not fit."""
    if x.ndim != 3 or not x.is_floating_point() or x.shape[-1] < 1:
        raise ValueError(f"x: expected floats (N, L, C_in), got {x.dtype} {tuple(x.shape)}")
    n, tokens, channels = x.shape
    if weight.ndim != 2 or weight.shape[1] != channels:
        raise ValueError(f"weight: expected (C_out, {channels}), got {tuple(weight.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is none of {', '.join(map(str, ACTIVATIONS))}")
    out_channels = weight.shape[0]
    norm_weight = None if rms_norm is None else rms_norm[0]
    shapes = {
        "weight": (weight, (out_channels, channels)),
        "bias": (bias, (out_channels,)),
        "gate": (gate, (n, out_channels)),
        "residual": (residual, (n, tokens, out_channels)),
        "rms_norm": (norm_weight, (channels,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected {shape}, got {tuple(tensor.shape)}")
        fits = tensor.is_floating_point() if name == "gate" else tensor.dtype == x.dtype
        if not fits or tensor.device != x.device:
            raise ValueError(f"{name}: {tensor.dtype} on {tensor.device}, but x is {x.dtype} on {x.device}")
