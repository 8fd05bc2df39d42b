"""Philox, the counter-based random numbers of the denoise step, in torch; the step's kernel computes the same.

The noise of an element depends only on the picture's seed, the step and the element, not on the batch or the device.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK32 = 0xFFFFFFFF


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al. 2011): map four counter words and two key words to four random words.

    Words are uint32 values in int64 tensors, which broadcast. The results equal those of Random123 and `tl.philox`.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # an int64 product wraps modulo 2^64, so its bits equal those of the unsigned product
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c2 = (product1 >> 32) & MASK32 ^ c1 ^ k0, (product0 >> 32) & MASK32 ^ c3 ^ k1
        c1, c3 = product1 & MASK32, product0 & MASK32
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def philox_normal(seeds: Tensor, step: int | Tensor, shape: Sequence[int]) -> Tensor:
    """Return the unit normal noise of a step for pictures of `shape`, each from its own seed.

    Args:
        seeds: (N,) int64; the bits of each are a 64-bit key.
        step: index of the step, 0 to 2^32 - 1: an int, or (N,) int64 on the seeds' device, one for each picture.
        shape: (H, W, C) of one picture. Element e, counted in that order, is word e % 4 of counter (e // 4, step).

    Returns:
        `(N, *shape)` float32.

    Raises:
        ValueError: the seeds are not (N,) int64.
    """
    if seeds.dtype != torch.int64 or seeds.ndim != 1:
        raise ValueError(f"seeds are {seeds.dtype} of shape {tuple(seeds.shape)}; they must be (N,) int64")
    elements = math.prod(shape)
    zero = seeds.new_zeros(1, 1)
    step = step[:, None] if isinstance(step, Tensor) else step
    counter = (torch.arange(-(-elements // 4), device=seeds.device)[None], zero + step, zero, zero)
    key = (seeds[:, None] & MASK32, (seeds[:, None] >> 32) & MASK32)
    words = torch.stack(philox4x32(counter, key), dim=-1)  # (N, elements / 4, 4)
    return _box_muller(words).flatten(1)[:, :elements].reshape(-1, *shape)


def _box_muller(words: Tensor) -> Tensor:
    """Map two pairs of uint32 words to two pairs of unit normals: (..., 4) int64 to (..., 4) float32."""
    # in (0, 1] like cuRAND's uniforms: 2^-33 keeps the logarithm finite
    uniform = words.to(torch.float32) * 2.0**-32 + 2.0**-33
    # in float64, so the rounded results hardly ever depend on a device's logarithm, sine and cosine
    radius, angle = uniform.to(torch.float64).unflatten(-1, (2, 2)).unbind(-1)
    radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2).to(torch.float32)
