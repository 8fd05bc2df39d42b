"""Scaled dot-product attention over tokens, read in place from a fused projection (no transposes, no head copies)."""

import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels._dispatch import Operation


@Operation
def attention(q: Tensor, k: Tensor, v: Tensor, *, heads: int, causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for each head, Vaswani et al. 2017 (arXiv 1706.03762), as diffusers' AttnProcessor2_0.

    Args:
        q: (N, L, heads * d), float32, float16 or bfloat16; rows may be strided (a slice of a fused projection).
        k, v: (N, L_keys, heads * d), the dtype of q.
        causal: token i sees keys 0 to i only.

    Returns: (N, L, heads * d), contiguous, the dtype of q.
    """
    if q.ndim != 3 or k.shape != v.shape or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(f"k, v: {tuple(k.shape)} and {tuple(v.shape)} do not fit q {tuple(q.shape)} (N, L, heads * d)")
    if heads < 1 or q.shape[2] % heads:
        raise ValueError(f"heads: {heads} does not divide the width {q.shape[2]}")
    split = [tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v)]  # (N, heads, L, d), views
    return F.scaled_dot_product_attention(*split, is_causal=causal).transpose(1, 2).flatten(2)
