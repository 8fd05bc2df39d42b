"""The Triton kernel of `layer_norm`: a program holds its token in registers and reads it once."""

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs
from fastdiff.kernels.device.to_fp8 import magnitudes, narrow


@triton.jit
def _times_plus(y, factor_ptr, term_ptr, c, inside, PLUS_ONE: tl.constexpr):
    """y (BC,) times a row, plus one where PLUS_ONE, plus a row; those that have pointers."""
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + c, mask=inside, other=0.0).to(tl.float32)
        y *= 1 + factor if PLUS_ONE else factor
    if term_ptr is not None:
        y += tl.load(term_ptr + c, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=("tokens",))
def layer_norm_kernel(
    y_ptr, y_scale_ptr, sum_ptr, x_ptr, residual_ptr, gate_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
    tokens, channels, x_picture, x_row, residual_picture, residual_row, gate_stride, scale_stride, shift_stride, eps,
    RMS: tl.constexpr, BC: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One token; y_scale_ptr: of y in fp8, of which STEP and LEAST are those of `to_fp8`."""
    await_inputs()
    picture = (tl.program_id(0) // tokens).to(tl.int64)
    row, c = (tl.program_id(0) % tokens).to(tl.int64), tl.arange(0, BC)
    inside = c < channels
    out = (picture * tokens + row) * channels + c

    y = tl.load(x_ptr + picture * x_picture + row * x_row + c, mask=inside, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        y = _times_plus(y, gate_ptr + picture * gate_stride, None, c, inside, False)
    if residual_ptr is not None:
        residual_ptr += picture * residual_picture
        y += tl.load(residual_ptr + row * residual_row + c, mask=inside, other=0.0).to(tl.float32)
        total = y.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, total, mask=inside)
        y = total.to(tl.float32)
    count = tl.cast(channels, tl.float32)
    if RMS:
        variance = tl.div_rn(tl.sum(y * y), count)
    else:
        y = tl.where(inside, y - tl.div_rn(tl.sum(y), count), 0.0)
        left = tl.div_rn(tl.sum(y), count)  # of the mean, which float32 rounds where it is large
        variance = tl.div_rn(tl.sum(y * y), count) - left * left
        y -= left
    y *= tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    y = _times_plus(y, weight_ptr, bias_ptr, c, inside, False)
    if scale_ptr is not None:
        scale_ptr, shift_ptr = scale_ptr + picture * scale_stride, shift_ptr + picture * shift_stride
        y = _times_plus(y, scale_ptr, shift_ptr, c, inside, True)
    if y_scale_ptr is not None:  # as what `to_fp8` reads would be rounded
        y = tl.where(inside, y, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(y_scale_ptr + tl.program_id(0), narrow(y_ptr + out, y, tl.max(magnitudes(y)), inside, STEP, LEAST))
    else:
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)
