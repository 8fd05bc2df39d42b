"""GEGLU: two linear layers of the same tokens as one matrix product, multiplied in its epilogue."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.host.dispatch import Call, Operation
from fastdiff.kernels.linear import LinearCall, launch_products, products_obstacle


@dataclass(frozen=True, eq=False)
class GegluCall(Call[Tensor]):
    """(x W1^T + b1) * gelu(x W2^T + b2), Shazeer 2020 (arXiv 2002.05202), as diffusers' GEGLU has it: gelu by erf.

    Args:
        x: (N, L, C_in), float32, float16 or bfloat16; tokens may be strided.
        weight: (2 C_out, C_in), the dtype of x: the rows of W1, then those of W2, whose product gelu is applied to.
        bias: (2 C_out,), the dtype of x.

    Returns: (N, L, C_out), contiguous, the dtype of x. Raises ValueError naming the argument that does not fit.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.x.device

    def check(self) -> None:
        LinearCall(self.x, self.weight, self.bias)  # both layers as one
        if self.weight.shape[0] % 2:
            raise ValueError(f"weight: expected (2 C_out, C_in), got {tuple(self.weight.shape)}")

    def reference(self) -> Tensor:
        first, second = F.linear(self.x, self.weight, self.bias).chunk(2, dim=-1)
        return first * F.gelu(second)

    def obstacle(self) -> str | None:
        return products_obstacle(self.x)

    def kernel(self) -> Tensor:
        return launch_products(self.x, self.weight.unflatten(0, (2, -1)), self.bias, activation2="gelu")


geglu = Operation("geglu", GegluCall)
