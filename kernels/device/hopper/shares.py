"""How the sm_90 kernels make an output in fp8: each SHARE channels of a token get a scale."""

from typing import Any, NamedTuple

from fastdiff.kernels.device.hopper.language import gl, gluon
from fastdiff.kernels.device.to_fp8 import magnitudes, rounded, scale_and_factor


class Narrowed(NamedTuple):
    """The constants of an output in fp8."""

    DTYPE: Any  # fp32, fp16 or bf16: rounded to fp8
    SHARE: Any  # channels
    STEP: Any  # as in `to_fp8`, and so is LEAST
    LEAST: Any


@gluon.jit
def narrow(y, scales, row, rows, share, shares, to: gl.constexpr):
    """Return y (some tokens, SHARE), float32, divided by their scales, which are stored.

    Args:
        scales: (rows, shares), a pointer.
        row: the first of the tokens.
        share: which of a token's shares y is.
    """
    y = rounded(y, to.DTYPE)
    scale, factor = scale_and_factor(gl.max(magnitudes(y), 1), to.STEP, to.LEAST)
    i = row + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
    gl.store(scales + i.to(gl.int64) * shares + share, scale, mask=(i < rows) & (share < shares))
    return y * gl.expand_dims(factor, 1)
