"""SwiGLU: two linear layers over the same tokens as one matrix product; the epilogue multiplies their outputs."""

from dataclasses import dataclass

from fastdiff.kernels.linear import GatedCall
from fastdiff.kernels.plans.dispatch import Operation


@dataclass(frozen=True, eq=False)
class SwigluCall(GatedCall):
    """silu(x W1^T + b1) * (x W2^T + b2), Shazeer 2020 (arXiv 2002.05202).

    Args:
        x: (N, L, C_in), float32, float16 or bfloat16; tokens may be strided. May be `Scaled`, as in `linear`.
        weight: (2 C_out, C_in), the dtype of x, or `Quantised`: the rows of W1, then the rows of W2. SiLU applies to
            the product with W1.
        bias: (2 C_out,), the dtype of x.

    Returns:
        (N, L, C_out), contiguous, the dtype of x.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    name = "swiglu"
    activation = "silu"


swiglu = Operation("swiglu", SwigluCall)
