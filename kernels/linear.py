"""Linear layers of tokens with what transformers do around them: RMSNorm before, activation, gate and residual after.

One matrix product and one epilogue; the normalised, the activated and the gated tokens are never written.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.device.linear import linear_kernel
from fastdiff.kernels.host.dispatch import Declined, Operation
from fastdiff.kernels.host.launching import (
    DTYPES,
    descriptor,
    has_descriptors,
    is_sm_90,
    launch,
    multiprocessors,
    side_by_side,
)
from fastdiff.kernels.host.recording import because
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
            Without a weight, which can be folded into the linear's, it is one kernel: the mean square is summed while
            x streams through, and scales the product at the end. On sm_90 in 16 bits two launches are faster.

    Returns: (N, L, C_out), contiguous, the dtype of x. Raises ValueError naming the argument that does not fit.
    """
    check(x, weight, bias, activation, gate, residual, rms_norm)
    if rms_norm is not None:
        x = layer_norm.reference(x, rms_norm[0], eps=rms_norm[1], rms=True)
    y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    if gate is not None:
        y = y * gate[:, None].to(y.dtype)
    return y if residual is None else y + residual


class Tile(NamedTuple):
    """The piece of the output that one program makes at a time, and how."""

    tokens: int
    channels: int
    block: int  # input channels of a step
    out: int  # output channels that the epilogue finishes at a time
    warps: int
    stages: int
    resident: int = 1  # programs that a multiprocessor holds at once


# By descriptors, in 16 bits, the best on an H200: each with the tiles that a multiprocessor must at least have of it.
TILES = (
    (2, Tile(128, 128, 64, 64, warps=4, stages=3, resident=2)),
    (0.5, Tile(64, 128, 128, 128, warps=4, stages=4)),
    (0, Tile(64, 64, 128, 64, warps=4, stages=3, resident=2)),
)
# With a residual, or RMSNorm before: both take registers. The sum of RMSNorm has the order of its steps, all as long.
ADDED_TILES = ((2, Tile(128, 256, 64, 128, warps=8, stages=3)), *TILES[1:])
NORMED_TILES = tuple((fewest, tile._replace(block=64)) for fewest, tile in ADDED_TILES)
DUAL_TILES = ((0, Tile(128, 128, 64, 128, warps=8, stages=3)),)
# By pointers, likewise.
POINTER_TILES = (
    (1, Tile(128, 64, 32, 64, warps=4, stages=3, resident=2)),
    (0, Tile(64, 64, 32, 64, warps=4, stages=3, resident=2)),
)
FLOAT32_DUAL_TILES = ((0, Tile(32, 32, 32, 32, warps=4, stages=2, resident=2)),)
FLOAT32_TILES = ((1, Tile(64, 64, 32, 64, warps=4, stages=2, resident=2)), *FLOAT32_DUAL_TILES)
FLOAT32_CHUNK = 128  # input channels: one long float32 sum would be thrice as far off as torch's
GROUP = 8  # rows of tiles that share the weights they find in the L2


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    rms_eps: float | None = None,
) -> Tensor:
    """`linear` by its kernel, x over its root mean square where `rms_eps` is given; weight (1, C_out, C_in).

    With a weight (2, C_out, C_in) it is `swiglu`.
    """
    n, tokens, channels = x.shape
    parts, out_channels, _ = weight.shape
    y = x.new_empty(n, tokens, out_channels)
    shape = (n, tokens) if gate is not None else (1, n * tokens)  # only a gate tells one picture from another
    x, weight, bias, gate = map(side_by_side, (x.reshape(*shape, channels), weight, bias, gate))
    out, weight = y.view(*shape, out_channels), weight.contiguous()
    residual = None if residual is None else residual.reshape(*shape, out_channels).contiguous()
    tensors = (out, x, weight, residual)
    by_descriptors = has_descriptors(x.device) and all(_suits_descriptors(t) for t in tensors if t is not None)
    tile = _first_busy(_choices(tensors, rms_eps is not None, by_descriptors), out)
    programs = min(_programs(tile, out), tile.resident * multiprocessors(x.device))
    loads = "descriptors" if by_descriptors else "pointers"
    because(lambda: f"by {loads}, {tile.tokens} tokens x {tile.channels} channels a tile")
    stride, gate_stride = x.stride(), 0 if gate is None else gate.stride(0)
    out, x, weight, residual = _descriptors(tensors, tile) if by_descriptors else tensors
    launch(
        linear_kernel, (programs,),
        out, x, weight, bias, gate, residual,
        *shape, channels, out_channels, *stride[:2], gate_stride, rms_eps or 0.0,
        ACTIVATION=activation or "none", DUAL=parts == 2, NORMED=rms_eps is not None,
        CHUNK=FLOAT32_CHUNK if y.dtype == torch.float32 else 0,
        BM=tile.tokens, BN=tile.channels, BK=tile.block, BY=tile.out, GROUP=GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def by_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rms_norm: tuple[Tensor | None, float] | None = None,
    **epilogue,
) -> Tensor:
    """`linear` by kernels alone. A norm with a weight is a launch of its own."""
    norm_weight, eps = rms_norm or (None, None)
    if norm_weight is not None:
        x, eps = layer_norm(x, norm_weight, eps=eps, rms=True), None
    return product(x, weight[None], bias, rms_eps=eps, **epilogue)


# (C_in, C_out) of products that torch's library makes faster than the kernel on sm_90 in bfloat16, with bias and
# GELU by tanh at most; its bits were found equal at batch 1, 2, 3, 8, 32 and 64 of 256 tokens.
LIBRARY = {(1152, 3456), (1152, 1152), (1152, 4608), (4608, 1152), (512, 1536)}
LIBRARY_TOKENS = 256  # a picture has a multiple of it


def _library_is_faster(x: Tensor, weight: Tensor, activation: str | None, *fused) -> bool:
    measured = is_sm_90(x.device) and x.dtype == torch.bfloat16
    with_gelu = activation == "gelu_tanh" and hasattr(torch, "_addmm_activation")  # no public name promises it
    plain = (activation is None or with_gelu) and all(step is None for step in fused)
    return measured and plain and tuple(weight.shape[::-1]) in LIBRARY and x.shape[1] % LIBRARY_TOKENS == 0


@linear.kernel
def _linear_triton(x, weight, bias=None, *, activation=None, gate=None, residual=None, rms_norm=None):
    check(x, weight, bias, activation, gate, residual, rms_norm)
    if x.dtype not in DTYPES or x.numel() == 0:
        return Declined(f"{tuple(x.shape)} of {x.dtype} has no kernel")
    if rms_norm is not None and is_sm_90(x.device) and x.itemsize == 2:
        x, rms_norm = layer_norm(x, rms_norm[0], eps=rms_norm[1], rms=True), None
    if _library_is_faster(x, weight, activation, gate, residual, rms_norm):
        because(lambda: f"{weight.shape[1]} to {weight.shape[0]} channels: torch's library is faster on sm_90")
        if activation is None or bias is None:
            return linear.reference(x, weight, bias, activation=activation)
        y = torch._addmm_activation(bias, x.flatten(0, 1), weight.T, use_gelu=True)  # GELU by tanh, in its epilogue
        return y.view(*x.shape[:2], -1)
    return by_kernel(x, weight, bias, activation=activation, gate=gate, residual=residual, rms_norm=rms_norm)


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


def _suits_descriptors(tensor: Tensor) -> bool:
    """Whether the copy engine can read the tensor: 16 bits, whole 16 bytes between rows and at the start."""
    strides = tensor.stride()[:-1]
    return tensor.itemsize == 2 and tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)


def _choices(tensors: tuple[Tensor | None, ...], normed: bool, by_descriptors: bool) -> tuple[tuple[float, Tile], ...]:
    _, x, weight, residual = tensors
    dual = weight.shape[0] == 2
    if not by_descriptors:
        return POINTER_TILES if x.itemsize == 2 else FLOAT32_DUAL_TILES if dual else FLOAT32_TILES
    return DUAL_TILES if dual else NORMED_TILES if normed else TILES if residual is None else ADDED_TILES


def _programs(tile: Tile, out: Tensor) -> int:
    """Tiles of the output."""
    pictures, tokens, channels = out.shape
    return pictures * -(-tokens // tile.tokens) * -(-channels // tile.channels)


def _first_busy(choices: tuple[tuple[float, Tile], ...], out: Tensor) -> Tile:
    return next(tile for fewest, tile in choices if _programs(tile, out) >= fewest * multiprocessors(out.device))


def _descriptors(tensors: tuple[Tensor | None, ...], tile: Tile) -> list:
    out, rows, columns = (tile.tokens, tile.out), (tile.tokens, tile.block), (tile.channels, tile.block)
    shapes = (out, rows, columns, out)
    return [t if t is None else descriptor(t, [1, *shape]) for t, shape in zip(tensors, shapes, strict=True)]
