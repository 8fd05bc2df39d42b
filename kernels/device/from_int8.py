"""The Triton kernel of `from_int8`."""

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs


@triton.jit
def from_int8_kernel(y_ptr, values_ptr, elements, B: tl.constexpr):
    """Convert B elements per program."""
    await_inputs()
    i = tl.program_id(0) * B + tl.arange(0, B)
    values = tl.load(values_ptr + i, mask=i < elements, other=0)
    tl.store(y_ptr + i, values.to(y_ptr.dtype.element_ty), mask=i < elements)
