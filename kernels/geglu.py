"""GEGLU: two linear layers over the same tokens as one matrix product; the epilogue multiplies their outputs."""

from dataclasses import dataclass

from fastdiff.kernels.linear import GatedCall
from fastdiff.kernels.plans.dispatch import Operation


@dataclass(frozen=True, eq=False)
class GegluCall(GatedCall):
    """(x W1^T + b1) * gelu(x W2^T + b2), Shazeer 2020 (arXiv 2002.05202), with the erf GELU as in diffusers' GEGLU.

    Args:
        x: (N, L, C_in), float32, float16 or bfloat16; tokens may be strided. May be `Scaled`, as in `linear`.
        weight: (2 C_out, C_in), the dtype of x, or `Quantised`: the rows of W1, then the rows of W2. GELU applies to
            the product with W2.
        bias: (2 C_out,), the dtype of x.

    Returns:
        (N, L, C_out), contiguous, the dtype of x.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    name = "geglu"
    activation2 = "gelu"


geglu = Operation("geglu", GegluCall)
