"""The numbers of an int8 weight in 16 bits, where a product takes them so."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.kernels.device.from_int8 import from_int8_kernel
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.dispatch import Call, Operation
from fastdiff.kernels.host.launching import is_sm_90, launch
from fastdiff.kernels.host.weights import INT8

BLOCK = 8192  # numbers of a program; chosen, not measured


@dataclass(frozen=True, eq=False)
class FromInt8Call(Call[Tensor]):
    """The same whole numbers in another dtype, which float16 and bfloat16 hold exactly.

    Args:
        values: int8, of any shape, contiguous.
        dtype: that of the result.

    Raises ValueError for values of another dtype, or not contiguous.
    """

    values: Tensor
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def check(self) -> None:
        if self.values.dtype != INT8 or not self.values.is_contiguous():
            raise ValueError(f"values: expected contiguous int8, got {self.values.dtype} {self.values.stride()}")

    def reference(self) -> Tensor:
        return self.values.to(self.dtype)

    def kernel(self) -> Tensor:
        y, elements = torch.empty_like(self.values, dtype=self.dtype), self.values.numel()
        launch(from_int8_kernel, (triton.cdiv(elements, BLOCK),), y, self.values, elements, B=BLOCK, num_warps=4)
        return y


from_int8 = Operation("from_int8", FromInt8Call)


def as_loaded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight's numbers as a kernel loads them, which multiplies them by an x of `dtype`.

    Those of int8 become the dtype of x in registers, but on sm_90 before the launch, where x has 16 bits. With an
    operand from registers Triton 3.6 made NaN of some U-Nets there, and ptxas ran many products one after another: a
    forward took 1.3 to 2.7 times as long as in bfloat16.
    """
    first = values.dtype == INT8 and dtype.itemsize == 2 and is_sm_90(values.device)
    return from_int8(values, dtype) if first else values
