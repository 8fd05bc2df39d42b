"""The device code of GroupNorm: statistics of a tensor, many tiles made one, normalising with what is left to merge.

Launched without the compiler's own fused multiply-adds: it would fuse a lane's product into the first sum across lanes,
and these, which end up with copies of one sum, would not agree on its last bit.
"""

from fastdiff.kernels._math import activate, await_inputs
from fastdiff.kernels._triton import tl, triton

# One compiled variant for all their values: a new resolution compiles nothing.
SIZES = (
    "images", "tiles", "tiles2", "pixels", "pixels2", "hw", "group_width", "span", "scale_stride", "shift_stride",
)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def moments_kernel(
    mean_ptr, m2_ptr, x_ptr, hw, channels, tiles, pixels, image_stride, pixel_stride, BP: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Moments of one tile and BC channels: Welford's recurrence down BP rows side by side, then Chan's across them."""
    await_inputs()
    blocks = tl.cdiv(channels, BC)
    pid = tl.program_id(0)
    image_tile, c = pid // blocks, pid % blocks * BC + tl.arange(0, BC)
    n, first = (image_tile // tiles).to(tl.int64), image_tile % tiles * pixels
    count = tl.minimum(pixels, hw - first)
    rows = tl.arange(0, BP)
    x_ptrs = x_ptr + n * image_stride + first.to(tl.int64) * pixel_stride + rows[:, None] * pixel_stride + c[None, :]

    mean = tl.zeros((BP, BC), tl.float32)
    m2 = tl.zeros((BP, BC), tl.float32)
    for start in range(0, count, BP):
        mask = (start + rows < count)[:, None] & (c < channels)[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        delta = tl.where(mask, x - mean, 0.0)
        mean = tl.fma(delta, 1.0 / (start // BP + 1), mean)
        m2 = tl.fma(delta, x - mean, m2)
        x_ptrs += BP * pixel_stride

    weights = ((count - rows + BP - 1) // BP).to(tl.float32)[:, None]  # pixels that each row has seen
    total = tl.sum(mean * weights, axis=0) / count
    distance = mean - total[None, :]
    out = image_tile.to(tl.int64) * channels + c
    tl.store(mean_ptr + out, total, mask=c < channels)
    tl.store(m2_ptr + out, tl.sum(m2 + weights * distance * distance, axis=0), mask=c < channels)


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    merged_mean_ptr, merged_mean2_ptr, merged_m2_ptr, merged_m2_2_ptr, mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr,
    images, channels, channels2, tiles, tiles2, pixels, pixels2, hw, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """All tiles of an image as one, for BC channels of a tensor, or of one of a pair; in order, BT at a time.

    The sums are about the mean of the first tile.
    """
    await_inputs()
    pid = tl.program_id(0)
    if mean2_ptr is not None:
        programs = images * tl.cdiv(channels, BC)
        if pid >= programs:
            pid -= programs
            merged_mean_ptr, merged_m2_ptr, mean_ptr, m2_ptr = merged_mean2_ptr, merged_m2_2_ptr, mean2_ptr, m2_2_ptr
            channels, tiles, pixels = channels2, tiles2, pixels2
    blocks = tl.cdiv(channels, BC)
    n, c = (pid // blocks).to(tl.int64), pid % blocks * BC + tl.arange(0, BC)
    first = n * tiles * channels + c
    shift = tl.load(mean_ptr + first, mask=c < channels, other=0.0)
    sums = tl.zeros((BC,), tl.float32)
    squares = tl.zeros((BC,), tl.float32)
    for start in range(0, tiles, BT):
        t = start + tl.arange(0, BT)[:, None]
        mask = (t < tiles) & (c < channels)[None, :]
        weights = tl.where(mask, tl.minimum(pixels, hw - t * pixels), 0).to(tl.float32)
        distance = tl.load(mean_ptr + first[None, :] + t * channels, mask=mask, other=0.0) - shift[None, :]
        m2 = tl.load(m2_ptr + first[None, :] + t * channels, mask=mask, other=0.0)
        sums += tl.sum(weights * distance, axis=0)
        squares += tl.sum(m2 + weights * distance * distance, axis=0)
    tl.store(merged_mean_ptr + n * channels + c, shift + sums / hw, mask=c < channels)
    tl.store(merged_m2_ptr + n * channels + c, squares - sums * (sums / hw), mask=c < channels)


@triton.jit
def _load_pair(ptr, ptr2, n, t, c, mask, channels, channels2, tiles, tiles2):
    """Rows t and columns c of statistics (N, tiles, C), or of those of a pair side by side; 0 where masked."""
    values = tl.load(ptr + (n * tiles + t) * channels + c, mask=mask & (c < channels), other=0.0)
    if ptr2 is not None:
        c2 = c - channels
        values += tl.load(ptr2 + (n * tiles2 + t) * channels2 + c2, mask=mask & (c2 >= 0), other=0.0)
    return values


@triton.jit
def _over_groups(x, WIDTH: tl.constexpr):
    """Each element's sum over its group of WIDTH neighbours."""
    groups = x.reshape(x.shape[0] // WIDTH, WIDTH)
    sums = tl.sum(groups, axis=1)[:, None]
    return tl.broadcast_to(sums, groups.shape).reshape(x.shape)


@triton.jit
def _coefficients(
    mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, n, c,
    channels, channels2, tiles, tiles2, pixels, pixels2, hw, group_width, eps, scale_stride, shift_stride,
    WHOLE: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """mean, a and b of the channels c of an image, such that the result before activation is a * (x - mean) + b.

    Chan's formula over the tiles and channels of a group, BJ at a time in order, as sums about the mean of the first:
    it is one of the entries merged, so no more digits can cancel than there are in their number. WHOLE is the group's
    width where c are whole groups: then each channel adds up its own tiles, else (0) all entries of its group.
    """
    group = c // group_width * group_width
    inside = c < channels + channels2
    base = _load_pair(mean_ptr, mean2_ptr, n, 0, group, inside, channels, channels2, tiles, tiles2)
    sums = tl.zeros_like(base)
    squares = tl.zeros_like(base)
    for start in range(0, tl.maximum(tiles, tiles2) * (1 if WHOLE else group_width), BJ):
        entry = start + tl.arange(0, BJ)[:, None]
        if WHOLE:
            t, member = entry, c[None, :]
        else:
            t, member = entry // group_width, group[None, :] + entry % group_width
        second = member >= channels
        mask = inside[None, :] & (t < tl.where(second, tiles2, tiles))
        covered = tl.where(second, pixels2, pixels)
        weights = tl.where(mask, tl.minimum(covered, hw - t * covered), 0).to(tl.float32)
        mean = _load_pair(mean_ptr, mean2_ptr, n, t, member, mask, channels, channels2, tiles, tiles2)
        m2 = _load_pair(m2_ptr, m2_2_ptr, n, t, member, mask, channels, channels2, tiles, tiles2)
        distance = mean - base[None, :]
        sums += tl.sum(weights * distance, axis=0)
        squares += tl.sum(m2 + weights * distance * distance, axis=0)
    if WHOLE:
        sums, squares = _over_groups(sums, WHOLE), _over_groups(squares, WHOLE)
    count = hw * group_width
    offset = sums / count
    a = tl.rsqrt(squares / count - offset * offset + eps)
    b = tl.zeros_like(a)
    if weight_ptr is not None:
        a = a * tl.load(weight_ptr + c, mask=inside).to(tl.float32)
        b += tl.load(bias_ptr + c, mask=inside).to(tl.float32)
    if scale_ptr is not None:
        factor = 1 + tl.load(scale_ptr + n * scale_stride + c, mask=inside).to(tl.float32)
        a = a * factor
        b = b * factor + tl.load(shift_ptr + n * shift_stride + c, mask=inside).to(tl.float32)
    return base + offset, a, b


@triton.jit(do_not_specialize=SIZES)
def normalise_kernel(
    y_ptr, x_ptr, x2_ptr, mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
    channels, channels2, tiles, tiles2, pixels, pixels2, hw, group_width, eps, scale_stride, shift_stride,
    span, image_stride, image_stride2, pixel_stride, pixel_stride2,
    ACTIVATION: tl.constexpr, WHOLE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """`span` pixels of one image and BC channels, all of the first tensor or all of the second."""
    await_inputs()
    width = channels + channels2
    blocks1 = tl.cdiv(channels, BC)
    blocks = blocks1 + tl.cdiv(channels2, BC)
    spans = tl.cdiv(hw, span)
    pid = tl.program_id(0)
    block, n = pid % blocks, (pid // blocks // spans).to(tl.int64)
    first = pid // blocks % spans * span
    stop = tl.minimum(first + span, hw)
    second = block >= blocks1
    own = tl.where(second, block - blocks1, block) * BC + tl.arange(0, BC)  # channel of its tensor
    c = own + tl.where(second, channels, 0)  # channel of y
    inside = (own < tl.where(second, channels2, channels))[None, :]
    if x2_ptr is not None:
        x_ptr = tl.where(second, x2_ptr, x_ptr)
        image_stride = tl.where(second, image_stride2, image_stride)
        pixel_stride = tl.where(second, pixel_stride2, pixel_stride)

    rows = tl.arange(0, BP)[:, None]
    y_ptrs = y_ptr + (n * hw + first) * width + rows * width + c[None, :]
    x_ptrs = x_ptr + n * image_stride + first.to(tl.int64) * pixel_stride + rows * pixel_stride + own[None, :]
    x = tl.load(x_ptrs, mask=(first + rows < stop) & inside, other=0.0)  # on its way while the tiles are merged

    mean, a, b = _coefficients(
        mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, n, c,
        channels, channels2, tiles, tiles2, pixels, pixels2, hw, group_width, eps, scale_stride, shift_stride,
        WHOLE, BJ,
    )  # fmt: skip
    for start in range(first, stop, BP):
        x_ptrs += BP * pixel_stride
        following = tl.load(x_ptrs, mask=(start + BP + rows < stop) & inside, other=0.0)
        y = activate(tl.fma(x.to(tl.float32) - mean[None, :], a[None, :], b[None, :]), ACTIVATION)
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(start + rows < stop) & inside)
        y_ptrs += BP * width
        x = following
