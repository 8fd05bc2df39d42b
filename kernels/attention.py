"""Scaled dot-product attention over tokens, read in place from a fused projection (no transposes, no head copies).

The kernel is FlashAttention (Dao 2023, arXiv 2307.08691): a block of queries walks over the keys with a running maximum
and sum, so the scores never leave the chip. A head width between two powers of two is split into two products.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.device.attention import attention_kernel
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.device.math import LOG2_E
from fastdiff.kernels.host.dispatch import Declined, Operation
from fastdiff.kernels.host.launching import DTYPES, capability, is_sm_90, launch, side_by_side
from fastdiff.kernels.host.recording import because


@Operation
def attention(q: Tensor, k: Tensor, v: Tensor, *, heads: int, causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for each head, Vaswani et al. 2017 (arXiv 1706.03762), as diffusers' AttnProcessor2_0.

    Args:
        q: (N, L, heads * d), float32, float16 or bfloat16; rows may be strided (a slice of a fused projection).
        k, v: (N, L_keys, heads * d), the dtype of q.
        causal: token i sees keys 0 to i only.

    Returns: (N, L, heads * d), contiguous, the dtype of q. Raises ValueError naming the argument that does not fit.
    """
    _check(q, k, v, heads)
    split = [tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v)]  # (N, heads, L, d), views
    return F.scaled_dot_product_attention(*split, is_causal=causal).transpose(1, 2).flatten(2)


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


def _tile(width: int, dtype: torch.dtype, queries: int, keys: int, device: torch.device) -> Tile:
    """Depends on the picture's shape, never on the batch: the bits of a sum are those of its blocks of keys."""
    if dtype == torch.float32:
        tile = Tile(32, 32, 4, 1) if width <= 80 else Tile(32, 16, 8, 1)
    elif width <= 64:
        tile = Tile(64, 64, 4, 3)
    elif width <= 256:
        tile = Tile(64, 32, 4, 3)
    else:
        tile = Tile(16, 32, 4, 3)
    if width > 128 and capability(device) < (9, 0):
        tile = tile._replace(stages=min(tile.stages, 2))  # shared memory
    return tile._replace(
        queries=min(tile.queries, max(16, triton.next_power_of_2(queries))),
        keys=min(tile.keys, max(16, triton.next_power_of_2(keys))),
    )


def _split(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Two powers of two, or one and 0, that cover the head width; tensor cores take 16 columns or more.

    In float32 two even where one would do: shorter sums round less. Beyond 128 the registers would not do.
    """
    whole = max(16, triton.next_power_of_2(width))
    rest = max(16, triton.next_power_of_2(max(1, width - whole // 2)))
    halves = whole // 2 + rest < whole or (dtype == torch.float32 and 16 < whole <= 128)
    return (whole // 2, rest) if halves else (whole, 0)


# (head widths up to, keys from): where torch's SDPA was the faster on an H200, in 16 bits; its bits were found equal at
# batch 1, 3, 8 and 64. In float32 it is 2 to 8 times as fast at every width: Triton has no tensor cores for it.
LIBRARY = ((32, None), (64, 1024), (128, 256), (192, 1024), (256, 256), (512, None))
MAX_WIDTH = {torch.float32: 256, torch.float16: 512, torch.bfloat16: 512}


def _why_the_library(q: Tensor, keys: int, width: int) -> str | None:
    if q.dtype not in DTYPES:
        return f"{q.dtype} has no kernel"
    if width > MAX_WIDTH[q.dtype]:
        return f"{q.dtype}: heads are {width} wide, the kernel's up to {MAX_WIDTH[q.dtype]}"
    if not is_sm_90(q.device):
        return None
    fewest = next(fewest for widest, fewest in LIBRARY if width <= widest)
    if q.dtype == torch.float32:
        return "float32: torch's library is faster on sm_90"
    if fewest is not None and keys >= fewest:
        return f"{keys} keys, {width} wide: torch's library is faster on sm_90"
    return None


@attention.kernel
def _attention_triton(q, k, v, *, heads, causal=False):
    _check(q, k, v, heads)
    width = q.shape[2] // heads
    reason = _why_the_library(q, k.shape[1], width)
    return flash_attention(q, k, v, heads, causal) if reason is None else Declined(reason)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool) -> Tensor:
    """`attention` by its kernel, for any head width up to MAX_WIDTH."""
    n, queries, channels = q.shape
    width, keys = channels // heads, k.shape[1]
    q, k, v = map(side_by_side, (q, k, v))
    tile, (first, second) = _tile(width, q.dtype, queries, keys, q.device), _split(width, q.dtype)
    out = q.new_empty(n, queries, channels)
    because(lambda: f"{tile.queries} queries x {tile.keys} keys a step, {width} columns as {first} + {second}")
    launch(
        attention_kernel, (n * heads * triton.cdiv(queries, tile.queries),),
        out, q, k, v, heads, queries, keys, width**-0.5 * LOG2_E.value,
        *(stride for tensor in (q, k, v) for stride in tensor.stride()[:2]),
        CAUSAL=causal, D=width, D1=first, D2=second, BM=tile.queries, BN=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, heads: int) -> None:
    if q.ndim != 3 or not q.is_floating_point():
        raise ValueError(f"q: expected floats (N, L, heads * d), got {q.dtype} {tuple(q.shape)}")
    for name, tensor in (("k", k), ("v", v)):
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise ValueError(f"{name}: {tensor.dtype} on {tensor.device}, but q is {q.dtype} on {q.device}")
        if tensor.ndim != 3 or tensor.shape != k.shape or tensor.shape[::2] != q.shape[::2] or tensor.shape[1] < 1:
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} does not fit q {tuple(q.shape)} (N, L, heads * d) or the other"
            )
    if heads < 1 or q.shape[2] % heads:
        raise ValueError(f"heads: {heads} does not divide the width {q.shape[2]}")
