"""The Triton kernel of `scale_input`."""

from fastdiff.kernels.device.denoise_columns import COLUMNS
from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs

INPUT_DIV = tl.constexpr(COLUMNS.index("input_div"))


@triton.jit
def scale_input_kernel(
    out_ptr, x_t_ptr, rows_ptr, step_ptr, elements, total, table_stride,
    WIDTH: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Divide BLOCK elements of one picture by its row's input_div, and store COPIES of them, `total` elements apart."""
    await_inputs()
    blocks = tl.cdiv(elements, BLOCK)
    n, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    e = first + tl.arange(0, BLOCK)
    mask = e < elements
    place = n * elements + e
    x_t = tl.load(x_t_ptr + place, mask=mask, other=0.0)
    x = tl.div_rn(x_t, tl.load(rows_ptr + n * table_stride + tl.load(step_ptr + n) * WIDTH + INPUT_DIV))
    for i in tl.static_range(COPIES):
        tl.store(out_ptr + i * total + place, x.to(out_ptr.dtype.element_ty), mask=mask)
