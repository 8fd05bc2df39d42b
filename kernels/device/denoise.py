"""The Triton kernel of `denoise_step`, including its noise."""

from fastdiff.kernels.device.denoise_columns import COLUMNS
from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs


def _offsets(*names: str) -> list[tl.constexpr]:
    """Return the offsets of these columns in a row, as constants that are part of Triton's cache keys."""
    return [tl.constexpr(COLUMNS.index(name)) for name in names]


X0_X, X0_M, X0_DIV = _offsets("x0_x", "x0_m", "x0_div")
PREV_X0, PREV_X, PREV_M = _offsets("prev_x0", "prev_x", "prev_m")
SIGMA, LOG_VARIANCE_MIN, LOG_VARIANCE_MAX = _offsets("sigma", "log_variance_min", "log_variance_max")
PREV_Y, PREV_H1, PREV_H2, PREV_H3 = _offsets("prev_y", "prev_h1", "prev_h2", "prev_h3")
Y_X, Y_X0, Y_S, Y_H1, Y_H2, Y_H3 = _offsets("y_x", "y_x0", "y_s", "y_h1", "y_h2", "y_h3")
KEEP_X, KEEP_X0, KEEP_M = _offsets("keep_x", "keep_x0", "keep_m")
CLIP_RANGE, READS_EARLIER, KEEPS_OUTPUT = _offsets("clip_range", "reads_earlier", "keeps_output")


@triton.jit
def _box_muller_pair(word0, word1):
    """Apply `host.philox._box_muller` to two uint32 words, also in float64."""
    u = (word0.to(tl.float32) * 2.0**-32 + 2.0**-33).to(tl.float64)
    angle = (word1.to(tl.float32) * 2.0**-32 + 2.0**-33).to(tl.float64) * 6.283185307179586
    radius = tl.sqrt(-2.0 * tl.log(u))
    return (radius * tl.cos(angle)).to(tl.float32), (radius * tl.sin(angle)).to(tl.float32)


@triton.jit
def _philox_normal(seed, step, first, BLOCK: tl.constexpr):
    """Return elements `first` to `first + BLOCK` of `philox_normal`; `first` is a multiple of 4."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + step.to(tl.uint32), zero, zero)
    z0, z1 = _box_muller_pair(w0, w1)
    z2, z3 = _box_muller_pair(w2, w3)
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))


@triton.jit
def denoise_kernel(
    x_prev_ptr, x0_ptr, kept_ptr, output_ptr, unguided_ptr, x_t_ptr, rows_ptr, step_ptr, noise_ptr, earlier_ptr,
    guidance_ptr, elements, channels, table_stride, guidance_scale,
    WIDTH: tl.constexpr, VARIANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK elements of one picture, in the operation order of `DenoiseStepCall._by_row`; no thresholding."""
    await_inputs()
    blocks = tl.cdiv(elements, BLOCK)
    n, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    e = first + tl.arange(0, BLOCK)
    mask = e < elements
    step = tl.load(step_ptr + n) if step_ptr is not None else 0
    row = rows_ptr + n * table_stride + step * WIDTH

    x_t = tl.load(x_t_ptr + n * elements + e, mask=mask, other=0.0)
    place = n * elements + e
    if VARIANCE != "fixed":
        place += (n * (elements // channels) + e // channels) * channels  # a pixel's C variances follow its C outputs
    eps = tl.load(output_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if unguided_ptr is not None:
        null = tl.load(unguided_ptr + place, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(guidance_ptr + n) if guidance_ptr is not None else guidance_scale
        eps = null + scale * (eps - null)

    x0 = tl.div_rn(tl.load(row + X0_X) * x_t + tl.load(row + X0_M) * eps, tl.load(row + X0_DIV))
    clip_range = tl.load(row + CLIP_RANGE)
    if clip_range > 0:
        x0 = tl.clamp(x0, -clip_range, clip_range, propagate_nan=tl.PropagateNan.ALL)
    x_prev = tl.load(row + PREV_X0) * x0 + tl.load(row + PREV_X) * x_t + tl.load(row + PREV_M) * eps
    if earlier_ptr is not None:  # noqa: SIM102 (Triton has no `and` of a constant and a number)
        if tl.load(row + READS_EARLIER) > 0:
            kept = n * 4 * elements + e  # picture n's s; its h1, h2 and h3 follow
            s = tl.load(earlier_ptr + kept, mask=mask, other=0.0)
            h1 = tl.load(earlier_ptr + kept + elements, mask=mask, other=0.0)
            h2 = tl.load(earlier_ptr + kept + 2 * elements, mask=mask, other=0.0)
            h3 = tl.load(earlier_ptr + kept + 3 * elements, mask=mask, other=0.0)
            y = tl.load(row + Y_X) * x_t + tl.load(row + Y_X0) * x0 + tl.load(row + Y_S) * s
            y += tl.load(row + Y_H1) * h1
            y += tl.load(row + Y_H2) * h2
            y += tl.load(row + Y_H3) * h3
            x_prev += tl.load(row + PREV_Y) * y
            x_prev += tl.load(row + PREV_H1) * h1
            x_prev += tl.load(row + PREV_H2) * h2
            x_prev += tl.load(row + PREV_H3) * h3
            if tl.load(row + KEEPS_OUTPUT) > 0:
                h3 = h2
                h2 = h1
                h1 = tl.load(row + KEEP_X) * x_t + tl.load(row + KEEP_X0) * x0 + tl.load(row + KEEP_M) * eps
            tl.store(kept_ptr + kept, y, mask=mask)
            tl.store(kept_ptr + kept + elements, h1, mask=mask)
            tl.store(kept_ptr + kept + 2 * elements, h2, mask=mask)
            tl.store(kept_ptr + kept + 3 * elements, h3, mask=mask)
    if noise_ptr is not None:
        sigma = tl.load(row + SIGMA)
        if sigma > 0:
            if noise_ptr.dtype.element_ty == tl.int64:
                noise = _philox_normal(tl.load(noise_ptr + n), step, first, BLOCK)
            else:
                noise = tl.load(noise_ptr + n * elements + e, mask=mask, other=0.0).to(tl.float32)
            if VARIANCE == "fixed":
                x_prev += sigma * noise
            else:
                learned = tl.load(output_ptr + place + channels, mask=mask, other=0.0).to(tl.float32)
                if VARIANCE == "learned":
                    std = tl.sqrt_rn(learned)
                else:
                    low, high = tl.load(row + LOG_VARIANCE_MIN), tl.load(row + LOG_VARIANCE_MAX)
                    std = tl.exp((low + (learned + 1) / 2 * (high - low)) / 2)
                x_prev += sigma * std * noise

    tl.store(x_prev_ptr + n * elements + e, x_prev, mask=mask)
    tl.store(x0_ptr + n * elements + e, x0, mask=mask)
