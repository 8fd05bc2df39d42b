"""Convert an int8 weight to 16 bits before a product that needs 16-bit operands."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.launching import launch
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.host.weights import INT8, NAMES
from fastdiff.kernels.plans.choices import first
from fastdiff.kernels.plans.dispatch import Operation

BLOCK = 8192  # elements per program; chosen, not measured


@dataclass(frozen=True, eq=False)
class FromInt8Call(Call[Tensor]):
    """Convert int8 values to another dtype. float16 and bfloat16 represent them exactly.

    Args:
        values: int8, any shape, contiguous.
        dtype: the dtype of the result.

    Raises:
        ValueError: `values` is not int8 or not contiguous.
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
        from fastdiff.kernels.device.from_int8 import from_int8_kernel  # imports Triton

        y, elements = torch.empty_like(self.values, dtype=self.dtype), self.values.numel()
        launch(from_int8_kernel, (triton.cdiv(elements, BLOCK),), y, self.values, elements, B=BLOCK, num_warps=4)
        return y


from_int8 = Operation("from_int8", FromInt8Call)


def as_loaded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight's values as a kernel that multiplies them by an x of `dtype` loads them.

    A kernel converts int8 values to the dtype of x in registers. Where the table of choices says so, they are converted
    here, before the launch.
    """
    format = NAMES.get(values.dtype)
    row = first("weight", values.device, format=format, bits=8 * dtype.itemsize) if format else None
    return values if row is None else from_int8(values, dtype)
