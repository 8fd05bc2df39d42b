"""The device code of GroupNorm: statistics of a tensor, many tiles made one, normalising.

A norm is a * (x - mean) + b before its activation. Where channels make whole groups in a program, mean is that of the
channel, else that of the group. Launched without the compiler's own fused multiply-adds: it would fuse a lane's product
into the first sum across lanes, and these, which end up with copies of one sum, would not agree on its last bit.
"""

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import activate, await_inputs, tree_sum

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


@triton.jit
def _block(block, channels, channels2, BC: tl.constexpr):
    """Of a block of channels: whether it is the second tensor's, its channels there and in the pair, which exist."""
    blocks1 = tl.cdiv(channels, BC)
    second = block >= blocks1
    own = tl.where(second, block - blocks1, block) * BC + tl.arange(0, BC)
    return second, own, own + tl.where(second, channels, 0), own < tl.where(second, channels2, channels)


@triton.jit
def _merge(
    mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, n, second, own, inside, channels, channels2, tiles, tiles2, pixels, pixels2,
    hw, TREE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """(BC,) mean and M2 of a `_block` of image n over all tiles; in order, BT at a time.

    The sums are about the mean of the first tile. TREE: no layout changes their order, for more kernels than one.
    """
    if mean2_ptr is not None:
        mean_ptr, m2_ptr = tl.where(second, mean2_ptr, mean_ptr), tl.where(second, m2_2_ptr, m2_ptr)
        tiles, pixels = tl.where(second, tiles2, tiles), tl.where(second, pixels2, pixels)
        channels = tl.where(second, channels2, channels)
    first = n * tiles * channels + own
    shift = tl.load(mean_ptr + first, mask=inside, other=0.0)
    sums = tl.zeros((BC,), tl.float32)
    squares = tl.zeros((BC,), tl.float32)
    for start in range(0, tiles, BT):
        t = start + tl.arange(0, BT)[:, None]
        mask = (t < tiles) & inside[None, :]
        weights = tl.where(mask, tl.minimum(pixels, hw - t * pixels), 0).to(tl.float32)
        distance = tl.load(mean_ptr + first[None, :] + t * channels, mask=mask, other=0.0) - shift[None, :]
        m2 = tl.load(m2_ptr + first[None, :] + t * channels, mask=mask, other=0.0)
        m2 += weights * distance * distance
        if TREE:
            sums += tree_sum(weights * distance, 1, BT, BC).reshape(BC)
            squares += tree_sum(m2, 1, BT, BC).reshape(BC)
        else:
            sums += tl.sum(weights * distance, axis=0)
            squares += tl.sum(m2, axis=0)
    return shift + sums / hw, squares - sums * (sums / hw)


@triton.jit
def whole_groups(mean, m2, pixels, eps, WIDTH: tl.constexpr):
    """Mean and M2 of channels, whole groups of WIDTH side by side -> a and b."""
    GROUPS: tl.constexpr = mean.numel // WIDTH
    members = mean.reshape(GROUPS, WIDTH)
    center = tree_sum(mean, GROUPS, WIDTH, 1) / WIDTH  # (GROUPS, 1)
    distance = (members - center).reshape(mean.shape)  # of a channel's mean from its group's
    total = tree_sum(m2 + pixels * distance * distance, GROUPS, WIDTH, 1)
    a = tl.broadcast_to(tl.rsqrt(total / (pixels * WIDTH) + eps), members.shape).reshape(mean.shape)
    return a, distance * a


@triton.jit
def modulate(a, b, weight_ptr, bias_ptr, scale_ptr, shift_ptr, row, c, inside_c, inside, scale_stride, shift_stride):
    """a and b with the norm's weight and bias of channels c, and the scale and shift of images `row`, if any."""
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=inside_c, other=0.0).to(tl.float32)
        a, b = a * weight, b * weight + tl.load(bias_ptr + c, mask=inside_c, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        scale = 1 + tl.load(scale_ptr + row * scale_stride + c, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + row * shift_stride + c, mask=inside, other=0.0).to(tl.float32)
        a, b = a * scale, b * scale + shift
    return a, b


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    out_mean_ptr, out_m2_ptr, out_b_ptr, mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr,
    weight_ptr, bias_ptr, scale_ptr, shift_ptr, channels, channels2, tiles, tiles2, pixels, pixels2, hw, eps,
    scale_stride, shift_stride, WHOLE: tl.constexpr, TREE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """All tiles of an image as one, for BC channels of a tensor, or of one of a pair: (N, C + C2) mean and M2.

    WHOLE: the width of groups that fill each program, or 0. With it a and b take the place of M2.
    """
    await_inputs()
    blocks = tl.cdiv(channels, BC) + tl.cdiv(channels2, BC)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    second, own, c, inside = _block(tl.program_id(0) % blocks, channels, channels2, BC)
    mean, m2 = _merge(
        mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, n, second, own, inside, channels, channels2, tiles, tiles2, pixels,
        pixels2, hw, TREE, BT, BC,
    )  # fmt: skip
    out = n * (channels + channels2) + c
    if WHOLE:
        m2, b = whole_groups(mean, m2, hw, eps, WHOLE)
        m2, b = modulate(
            m2, b, weight_ptr, bias_ptr, scale_ptr, shift_ptr, n, c, inside, inside, scale_stride, shift_stride
        )
        tl.store(out_b_ptr + out, b, mask=inside)
    tl.store(out_mean_ptr + out, mean, mask=inside)
    tl.store(out_m2_ptr + out, m2, mask=inside)


@triton.jit
def _load_pair(ptr, ptr2, n, t, c, mask, channels, channels2, tiles, tiles2):
    """Rows t and columns c of statistics (N, tiles, C), or of those of a pair side by side; 0 where masked."""
    values = tl.load(ptr + (n * tiles + t) * channels + c, mask=mask & (c < channels), other=0.0)
    if ptr2 is not None:
        c2 = c - channels
        values += tl.load(ptr2 + (n * tiles2 + t) * channels2 + c2, mask=mask & (c2 >= 0), other=0.0)
    return values


@triton.jit
def _any_groups(
    mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, n, c, inside, channels, channels2, tiles, tiles2, pixels, pixels2, hw,
    group_width, eps, BJ: tl.constexpr,
):  # fmt: skip
    """mean and a of the group of each channel c of image n: groups may lie across programs and the seam of a pair.

    Chan's formula over the tiles and channels of a group, BJ at a time in order, as sums about the mean of the first:
    it is one of the entries merged, so no more digits can cancel than there are in their number.
    """
    group = c // group_width * group_width
    base = _load_pair(mean_ptr, mean2_ptr, n, 0, group, inside, channels, channels2, tiles, tiles2)
    sums = tl.zeros_like(base)
    squares = tl.zeros_like(base)
    for start in range(0, tl.maximum(tiles, tiles2) * group_width, BJ):
        entry = start + tl.arange(0, BJ)[:, None]
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
    count = hw * group_width
    offset = sums / count
    return base + offset, tl.rsqrt(squares / count - offset * offset + eps)


@triton.jit
def _place(
    pid, y_ptr, x_ptr, x2_ptr, channels, channels2, hw, span, image_stride, image_stride2, pixel_stride, pixel_stride2,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of a program: its image, its first pixel, its `_block` of channels.

    And, for its first BP pixels, pointers to y and x, and the stride of x.
    """
    width, blocks = channels + channels2, tl.cdiv(channels, BC) + tl.cdiv(channels2, BC)
    spans = tl.cdiv(hw, span)
    n, first = (pid // blocks // spans).to(tl.int64), pid // blocks % spans * span
    second, own, c, inside = _block(pid % blocks, channels, channels2, BC)
    if x2_ptr is not None:
        x_ptr = tl.where(second, x2_ptr, x_ptr)
        image_stride = tl.where(second, image_stride2, image_stride)
        pixel_stride = tl.where(second, pixel_stride2, pixel_stride)
    rows = tl.arange(0, BP)[:, None]
    y_ptrs = y_ptr + (n * hw + first) * width + rows * width + c[None, :]
    x_ptrs = x_ptr + n * image_stride + first.to(tl.int64) * pixel_stride + rows * pixel_stride + own[None, :]
    return n, first, second, own, c, inside, y_ptrs, x_ptrs, pixel_stride


@triton.jit(do_not_specialize=SIZES)
def normalise_kernel(
    y_ptr, x_ptr, x2_ptr, mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
    channels, channels2, merged, merged2, tiles, tiles2, pixels, pixels2, hw, group_width, eps,
    scale_stride, shift_stride, span, image_stride, image_stride2, pixel_stride, pixel_stride2,
    ACTIVATION: tl.constexpr, WHOLE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """`span` pixels of one image and BC channels, all of the first tensor or all of the second.

    The statistics are of the tensors' channels, or merged into those of one, (N, 1, C + C2), whose group may be any.
    """
    await_inputs()
    n, first, second, own, c, inside, y_ptrs, x_ptrs, pixel_stride = _place(
        tl.program_id(0), y_ptr, x_ptr, x2_ptr, channels, channels2, hw, span,
        image_stride, image_stride2, pixel_stride, pixel_stride2, BP, BC,
    )  # fmt: skip
    stop = tl.minimum(first + span, hw)
    rows, there = tl.arange(0, BP)[:, None], inside[None, :]
    x = tl.load(x_ptrs, mask=(first + rows < stop) & there, other=0.0)  # on its way while the tiles are merged

    if WHOLE:
        mean, m2 = _merge(
            mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, n, second, own, inside, channels, channels2, tiles, tiles2, pixels,
            pixels2, hw, True, BJ, BC,
        )  # fmt: skip
        a, b = whole_groups(mean, m2, hw, eps, WHOLE)
    else:
        mean, a = _any_groups(
            mean_ptr, mean2_ptr, m2_ptr, m2_2_ptr, n, c, inside, merged, merged2, tiles, tiles2, pixels, pixels2, hw,
            group_width, eps, BJ,
        )  # fmt: skip
        b = tl.zeros_like(a)
    a, b = modulate(a, b, weight_ptr, bias_ptr, scale_ptr, shift_ptr, n, c, inside, inside, scale_stride, shift_stride)
    for start in range(first, stop, BP):
        x_ptrs += BP * pixel_stride
        following = tl.load(x_ptrs, mask=(start + BP + rows < stop) & there, other=0.0)
        y = activate(tl.fma(x.to(tl.float32) - mean[None, :], a[None, :], b[None, :]), ACTIVATION)
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(start + rows < stop) & there)
        y_ptrs += BP * (channels + channels2)
        x = following


@triton.jit(do_not_specialize=SIZES)
def apply_kernel(
    y_ptr, x_ptr, x2_ptr, mean_ptr, a_ptr, b_ptr, channels, channels2, hw,
    image_stride, image_stride2, pixel_stride, pixel_stride2,
    ACTIVATION: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`normalise_kernel` of BP pixels by mean, a and b, each (N, C + C2).

    From the last pixel to the first: what a convolution wrote last is in the cache still, and so will be what the next
    reads first.
    """
    await_inputs()
    n, first, _, _, c, inside, y_ptrs, x_ptrs, _ = _place(
        tl.num_programs(0) - 1 - tl.program_id(0), y_ptr, x_ptr, x2_ptr, channels, channels2, hw, BP,
        image_stride, image_stride2, pixel_stride, pixel_stride2, BP, BC,
    )  # fmt: skip
    there = (first + tl.arange(0, BP) < hw)[:, None] & inside[None, :]
    x = tl.load(x_ptrs, mask=there, other=0.0)
    offset = n * (channels + channels2) + c
    mean = tl.load(mean_ptr + offset, mask=inside, other=0.0)
    a = tl.load(a_ptr + offset, mask=inside, other=0.0)
    b = tl.load(b_ptr + offset, mask=inside, other=0.0)
    y = activate(tl.fma(x.to(tl.float32) - mean[None, :], a[None, :], b[None, :]), ACTIVATION)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=there)
