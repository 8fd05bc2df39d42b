"""GEGLU: two linear layers of the same tokens as one matrix product, multiplied in its epilogue."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.linear import GatedCall
from fastdiff.kernels.plans.dispatch import Operation


@dataclass(frozen=True, eq=False)
class GegluCall(GatedCall):
    """(x W1^T + b1) * gelu(x W2^T + b2), Shazeer 2020 (arXiv 2002.05202), as diffusers' GEGLU has it: gelu by erf.

    Args:
        x: (N, L, C_in), float32, float16 or bfloat16; tokens may be strided. `Scaled` as in `linear`.
        weight: (2 C_out, C_in), the dtype of x, or `Quantised`: the rows of W1, then the rows of W2, whose
            product gelu is applied to.
        bias: (2 C_out,), the dtype of x.

    Returns: (N, L, C_out), contiguous, the dtype of x. Raises ValueError naming the argument that does not fit.
    """

    name = "geglu"
    activation2 = "gelu"

    def reference(self) -> Tensor:
        first, second = self.products()
        return first * F.gelu(second)


geglu = Operation("geglu", GegluCall)
