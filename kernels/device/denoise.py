"""The Triton kernel of `denoise_step`, with its noise."""

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs


@triton.jit
def _box_muller_pair(word0, word1):
    """`host.philox._box_muller` of two uint32 words, in float64 like it."""
    u = (word0.to(tl.float32) * 2.0**-32 + 2.0**-33).to(tl.float64)
    angle = (word1.to(tl.float32) * 2.0**-32 + 2.0**-33).to(tl.float64) * 6.283185307179586
    radius = tl.sqrt(-2.0 * tl.log(u))
    return (radius * tl.cos(angle)).to(tl.float32), (radius * tl.sin(angle)).to(tl.float32)


@triton.jit
def _philox_normal(seed, step, first, BLOCK: tl.constexpr):
    """Elements `first` to `first + BLOCK` of `philox_normal`; first is a multiple of 4."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + step.to(tl.uint32), zero, zero)
    z0, z1 = _box_muller_pair(w0, w1)
    z2, z3 = _box_muller_pair(w2, w3)
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))


@triton.jit
def denoise_kernel(
    x_prev_ptr, x0_ptr, kept_sample_ptr, kept_output_ptr, output_ptr, unguided_ptr, x_t_ptr, rows_ptr, step_ptr,
    noise_ptr, s_ptr, h1_ptr, h2_ptr, h3_ptr,
    elements, channels, guidance_scale, clip_range,
    COLUMNS: tl.constexpr, VARIANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one picture: `DenoiseStepCall._by_row` in its order of operations, without thresholding."""
    await_inputs()
    blocks = tl.cdiv(elements, BLOCK)
    n, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    e = first + tl.arange(0, BLOCK)
    mask = e < elements
    step = tl.load(step_ptr) if step_ptr is not None else 0
    row = rows_ptr + step * COLUMNS

    x_t = tl.load(x_t_ptr + n * elements + e, mask=mask, other=0.0)
    m = n * elements + e
    if VARIANCE != "fixed":
        m += (n * (elements // channels) + e // channels) * channels  # each pixel has its C variances behind its C
    eps = tl.load(output_ptr + m, mask=mask, other=0.0).to(tl.float32)
    if unguided_ptr is not None:
        null = tl.load(unguided_ptr + m, mask=mask, other=0.0).to(tl.float32)
        eps = null + guidance_scale * (eps - null)

    x0 = tl.div_rn(tl.load(row) * x_t + tl.load(row + 1) * eps, tl.load(row + 2))
    if clip_range is not None:
        x0 = tl.clamp(x0, -clip_range, clip_range, propagate_nan=tl.PropagateNan.ALL)
    x_prev = tl.load(row + 3) * x0 + tl.load(row + 4) * x_t + tl.load(row + 5) * eps
    if kept_sample_ptr is not None:
        s = tl.load(s_ptr + n * elements + e, mask=mask, other=0.0)
        h1 = tl.load(h1_ptr + n * elements + e, mask=mask, other=0.0)
        h2 = tl.load(h2_ptr + n * elements + e, mask=mask, other=0.0)
        h3 = tl.load(h3_ptr + n * elements + e, mask=mask, other=0.0)
        y = tl.load(row + 13) * x_t + tl.load(row + 14) * x0 + tl.load(row + 15) * s
        y += tl.load(row + 16) * h1
        y += tl.load(row + 17) * h2
        y += tl.load(row + 18) * h3
        x_prev += tl.load(row + 9) * y
        x_prev += tl.load(row + 10) * h1
        x_prev += tl.load(row + 11) * h2
        x_prev += tl.load(row + 12) * h3
        kept_output = tl.load(row + 19) * x_t + tl.load(row + 20) * x0 + tl.load(row + 21) * eps
        tl.store(kept_sample_ptr + n * elements + e, y, mask=mask)
        tl.store(kept_output_ptr + n * elements + e, kept_output, mask=mask)
    if noise_ptr is not None:
        sigma = tl.load(row + 6)
        if sigma > 0:
            if noise_ptr.dtype.element_ty == tl.int64:
                noise = _philox_normal(tl.load(noise_ptr + n), step, first, BLOCK)
            else:
                noise = tl.load(noise_ptr + n * elements + e, mask=mask, other=0.0).to(tl.float32)
            if VARIANCE == "fixed":
                x_prev += sigma * noise
            else:
                learned = tl.load(output_ptr + m + channels, mask=mask, other=0.0).to(tl.float32)
                if VARIANCE == "learned":
                    std = tl.sqrt_rn(learned)
                else:
                    low, high = tl.load(row + 7), tl.load(row + 8)
                    std = tl.exp((low + (learned + 1) / 2 * (high - low)) / 2)
                x_prev += sigma * std * noise

    tl.store(x_prev_ptr + n * elements + e, x_prev, mask=mask)
    tl.store(x0_ptr + n * elements + e, x0, mask=mask)
