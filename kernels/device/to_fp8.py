"""The Triton kernels of `to_fp8`: a program holds a short row, or reduces a share of a long one."""

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs


@triton.jit
def magnitudes(x):
    """Return the magnitudes of x, with 0 for NaN, so that NaN does not spread to the row."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def narrow(y_ptrs, x, largest, inside, STEP: tl.constexpr, LEAST: tl.constexpr):
    """Store x (float32) divided by the scale, max(largest, LEAST) * STEP. Return the scale."""
    scale = tl.maximum(largest, LEAST) * STEP
    tl.store(y_ptrs, (x * tl.div_rn(1.0, scale)).to(y_ptrs.dtype.element_ty), mask=inside)
    return scale


@triton.jit
def row_kernel(
    y_ptr, scale_ptr, x_ptr, elements, x_row, B: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr
):  # fmt: skip
    """Quantise one row per program."""
    await_inputs()
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    inside = i < elements
    x = tl.load(x_ptr + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    scale = narrow(y_ptr + row * elements + i, x, tl.max(magnitudes(x)), inside, STEP, LEAST)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=("first", "shares"))
def largest_kernel(largest_ptr, x_ptr, elements, x_row, share_count, first, shares, B: tl.constexpr):
    """Store the largest magnitude of each share of a row, (rows, shares); this tensor's shares start at `first`."""
    await_inputs()
    row, share = (tl.program_id(0) // share_count).to(tl.int64), tl.program_id(0) % share_count
    x_ptr += row * x_row
    largest = tl.zeros((B,), tl.float32)
    for start in range(share * B, elements, share_count * B):
        i = start + tl.arange(0, B)
        x = tl.load(x_ptr + i, mask=i < elements, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitudes(x))
    tl.store(largest_ptr + row * shares + first + share, tl.max(largest))


@triton.jit(do_not_specialize=("shares",))
def scale_kernel(
    y_ptr, scale_ptr, x_ptr, largest_ptr, elements, x_row, blocks, shares,
    B: tl.constexpr, BS: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Quantise a block of a row, given the largest magnitude of each share."""
    await_inputs()
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    share, i = tl.arange(0, BS), block * B + tl.arange(0, B)
    inside = i < elements
    x = tl.load(x_ptr + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.load(largest_ptr + row * shares + share, mask=share < shares, other=0.0))
    scale = narrow(y_ptr + row * elements + i, x, largest, inside, STEP, LEAST)
    if block == 0:
        tl.store(scale_ptr + row, scale)
