"""The Triton kernel of `layer_norm`: a program reads a token once and holds it in registers, in two parts.

The parts are powers of two chosen to leave few lanes idle: 1280 channels are 1024 + 256.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs
from fastdiff.kernels.device.to_fp8 import magnitudes, narrow


class Inputs(NamedTuple):
    """A field per input tensor: its pointer (None if absent), its stride or its loaded values."""

    x: Any
    residual: Any
    gate: Any
    weight: Any
    bias: Any
    scale: Any
    shift: Any


@triton.jit
def _load(ptr, offset, c, inside):
    if ptr is None:
        return 0.0
    else:
        return tl.load(ptr + offset + c, mask=inside, other=0.0)


@triton.jit
def _load_all(at, offsets, c, inside):
    """Load all inputs for some channels, so that no load waits for another."""
    return Inputs(
        _load(at.x, offsets.x, c, inside),
        _load(at.residual, offsets.residual, c, inside),
        _load(at.gate, offsets.gate, c, inside),
        _load(at.weight, offsets.weight, c, inside),
        _load(at.bias, offsets.bias, c, inside),
        _load(at.scale, offsets.scale, c, inside),
        _load(at.shift, offsets.shift, c, inside),
    )


@triton.jit
def _add_residual(y, at, gate, residual, sum_ptr, out, inside):
    """Return y, or the rounded sum of the gated y and the residual, which is also stored."""
    if at.gate is not None:
        y *= gate.to(tl.float32)
    if at.residual is not None:
        total = (y + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, total, mask=inside)
        y = total.to(tl.float32)
    return y


@triton.jit
def _normalise(y, y2, inside, inside2, eps, C: tl.constexpr, RMS: tl.constexpr):
    """Normalise both parts of a token of C channels."""
    count: tl.constexpr = float(C)
    if RMS:
        variance = tl.div_rn(tl.sum(y * y) + tl.sum(y2 * y2), count)
    else:
        mean = tl.div_rn(tl.sum(y) + tl.sum(y2), count)
        y, y2 = tl.where(inside, y - mean, 0.0), tl.where(inside2, y2 - mean, 0.0)
        left = tl.div_rn(tl.sum(y) + tl.sum(y2), count)  # rounding error of the mean, if the mean is large
        variance = tl.div_rn(tl.sum(y * y) + tl.sum(y2 * y2), count) - left * left
        y, y2 = y - left, y2 - left
    factor = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    return y * factor, y2 * factor


@triton.jit
def _modulate(y, at, values):
    if at.weight is not None:
        y *= values.weight.to(tl.float32)
    if at.bias is not None:
        y += values.bias.to(tl.float32)
    if at.shift is not None:
        y = y * (1 + values.scale.to(tl.float32)) + values.shift.to(tl.float32)
    elif at.scale is not None:
        y *= 1 + values.scale.to(tl.float32)
    return y


@triton.jit
def _rounded(y, inside, dtype: tl.constexpr):
    """Round y to the dtype in which `to_fp8` would read it."""
    return tl.where(inside, y, 0.0).to(dtype).to(tl.float32)


@triton.jit
def _write_token(
    token, tokens, c, c2, y_ptr, y_scale_ptr, sum_ptr, branch_ptr, at, by_picture, by_token, eps, branch_eps,
    RMS: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Normalise one token. at: pointers to the first token; by_picture, by_token: strides."""
    inside, inside2 = c < C, c2 < C
    picture, row = tl.cast(token // tokens, tl.int64), tl.cast(token % tokens, tl.int64)
    first = tl.cast(token, tl.int64) * C
    out, out2 = first + c, first + c2
    offsets = Inputs(
        picture * by_picture.x + row * by_token.x,
        picture * by_picture.residual + row * by_token.residual,
        picture * by_picture.gate,
        0,
        0,
        picture * by_picture.scale,
        picture * by_picture.shift,
    )
    early = at
    if branch_ptr is not None:  # with registers for everything, fewer tokens would run at a time
        early = Inputs(at.x, at.residual, None, None, None, None, None)
    values, values2 = _load_all(early, offsets, c, inside), _load_all(early, offsets, c2, inside2)
    y, y2, gate, gate2 = values.x.to(tl.float32), values2.x.to(tl.float32), values.gate, values2.gate
    if branch_ptr is not None:
        y, y2 = _normalise(y, y2, inside, inside2, branch_eps, C, True)
        y *= tl.load(branch_ptr + c, mask=inside, other=0.0).to(tl.float32)
        y2 *= tl.load(branch_ptr + c2, mask=inside2, other=0.0).to(tl.float32)
        gate, gate2 = _load(at.gate, offsets.gate, c, inside), _load(at.gate, offsets.gate, c2, inside2)
    y = _add_residual(y, at, gate, values.residual, sum_ptr, out, inside)
    y2 = _add_residual(y2, at, gate2, values2.residual, sum_ptr, out2, inside2)
    y, y2 = _normalise(y, y2, inside, inside2, eps, C, RMS)
    if branch_ptr is not None:
        late = Inputs(None, None, None, at.weight, at.bias, at.scale, at.shift)
        values, values2 = _load_all(late, offsets, c, inside), _load_all(late, offsets, c2, inside2)
    y, y2 = _modulate(y, at, values), _modulate(y2, at, values2)
    if y_scale_ptr is not None:
        dtype: tl.constexpr = at.x.dtype.element_ty
        y, y2 = _rounded(y, inside, dtype), _rounded(y2, inside2, dtype)
        largest = tl.maximum(tl.max(magnitudes(y)), tl.max(magnitudes(y2)))
        narrow(y_ptr + out2, y2, largest, inside2, STEP, LEAST)
        tl.store(y_scale_ptr + token, narrow(y_ptr + out, y, largest, inside, STEP, LEAST))
    else:
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptr + out2, y2.to(y_ptr.dtype.element_ty), mask=inside2)


@triton.jit(do_not_specialize=("pictures", "tokens"))
def layer_norm_kernel(
    y_ptr, y_scale_ptr, sum_ptr, x_ptr, residual_ptr, gate_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
    branch_ptr, pictures, tokens, x_picture, x_row, residual_picture, residual_row, gate_stride, scale_stride,
    shift_stride, eps, branch_eps,
    LOOP: tl.constexpr, RMS: tl.constexpr, C: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, STEP: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Normalise a token of C channels, in parts of B1 and up to B2. LOOP: a program loops over tokens.

    y_scale_ptr: the scales of y if y is fp8; STEP and LEAST as in `to_fp8`. branch_ptr, branch_eps: of an RMSNorm of x
    before everything else; None for none.
    """
    await_inputs()
    at = Inputs(x_ptr, residual_ptr, gate_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    by_picture = Inputs(x_picture, residual_picture, gate_stride, 0, 0, scale_stride, shift_stride)
    by_token = Inputs(x_row, residual_row, 0, 0, 0, 0, 0)
    c, c2 = tl.arange(0, B1), B1 + tl.arange(0, B2)
    if LOOP:
        for token in range(tl.program_id(0), pictures * tokens, tl.num_programs(0)):
            _write_token(
                token, tokens, c, c2, y_ptr, y_scale_ptr, sum_ptr, branch_ptr, at, by_picture, by_token, eps,
                branch_eps, RMS, C, STEP, LEAST,
            )  # fmt: skip
    else:
        _write_token(
            tl.program_id(0), tokens, c, c2, y_ptr, y_scale_ptr, sum_ptr, branch_ptr, at, by_picture, by_token, eps,
            branch_eps, RMS, C, STEP, LEAST,
        )  # fmt: skip
