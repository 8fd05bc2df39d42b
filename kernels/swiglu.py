"""SwiGLU: two linear layers of the same tokens as one matrix product, multiplied in its epilogue."""

import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.host.dispatch import Declined, Operation
from fastdiff.kernels.host.launching import DTYPES
from fastdiff.kernels.linear import check, product


@Operation
def swiglu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(x W1^T + b1) * (x W2^T + b2), Shazeer 2020 (arXiv 2002.05202).

    Args:
        x: (N, L, C_in), float32, float16 or bfloat16; tokens may be strided.
        weight: (2 C_out, C_in), the dtype of x: the rows of W1, which silu is applied to, then those of W2.
        bias: (2 C_out,), the dtype of x.

    Returns: (N, L, C_out), contiguous, the dtype of x. Raises ValueError naming the argument that does not fit.
    """
    _check(x, weight, bias)
    first, second = F.linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(first) * second


@swiglu.kernel
def _swiglu_triton(x, weight, bias=None):
    _check(x, weight, bias)
    if x.dtype not in DTYPES or x.numel() == 0:
        return Declined(f"{tuple(x.shape)} of {x.dtype} has no kernel")
    return product(x, weight.unflatten(0, (2, -1)), bias, activation="silu")


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check(x, weight, bias)
    if weight.shape[0] % 2:
        raise ValueError(f"weight: expected (2 C_out, C_in), got {tuple(weight.shape)}")
