"""The Triton kernels of GroupNorm: compute moments, merge tiles of moments, normalise.

A norm is a * (x - mean) + b before its activation. If a program holds whole groups, mean is the channel's mean,
otherwise the group's. The kernels are launched without the compiler's fused multiply-adds: it would fuse a lane's
product into the first sum across lanes, and lanes that end up with copies of one sum would differ in its last bit.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import activate, await_inputs, tree_sum

# One compiled variant serves all values: a new resolution compiles nothing. Inside a tuple they would be specialised.
SIZES = (
    "tiles",
    "tiles2",
    "pixels",
    "pixels2",
    "hw",
    "group_width",
    "span",
    "scale_stride",
    "shift_stride",
    "temb_stride",
)


class TiledMoments(NamedTuple):
    """Moments as kernel arguments: pointers to (N, tiles, channels), None if there is no second tensor."""

    mean: Any
    m2: Any
    channels: Any
    tiles: Any
    pixels: Any  # per full tile


class Affine(NamedTuple):
    """The weight and bias of a norm, and the scale and shift after it, as pointers or None; and its eps."""

    weight: Any  # (C,)
    bias: Any
    scale: Any  # (N, C)
    shift: Any
    eps: Any
    scale_stride: Any
    shift_stride: Any


class Block(NamedTuple):
    """A block of channels of a tensor, or of one tensor of a pair."""

    second: Any  # whether it belongs to the second tensor
    own: Any  # (BC,) channels in that tensor
    c: Any  # (BC,) channels in the concatenation
    inside: Any  # (BC,) mask


@triton.jit(do_not_specialize=SIZES)
def moments_kernel(
    mean_ptr, m2_ptr, x_ptr, hw, channels, tiles, pixels, picture_stride, pixel_stride,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute moments of one tile and BC channels: BP parallel Welford recurrences, merged by Chan's formula."""
    await_inputs()
    blocks = tl.cdiv(channels, BC)
    pid = tl.program_id(0)
    picture_tile, c = pid // blocks, pid % blocks * BC + tl.arange(0, BC)
    n, first = (picture_tile // tiles).to(tl.int64), picture_tile % tiles * pixels
    count = tl.minimum(pixels, hw - first)
    rows = tl.arange(0, BP)
    x_ptrs = x_ptr + n * picture_stride + first.to(tl.int64) * pixel_stride + rows[:, None] * pixel_stride + c[None, :]

    mean = tl.zeros((BP, BC), tl.float32)
    m2 = tl.zeros((BP, BC), tl.float32)
    for start in range(0, count, BP):
        mask = (start + rows < count)[:, None] & (c < channels)[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        delta = tl.where(mask, x - mean, 0.0)
        mean = tl.fma(delta, 1.0 / (start // BP + 1), mean)
        m2 = tl.fma(delta, x - mean, m2)
        x_ptrs += BP * pixel_stride

    weights = ((count - rows + BP - 1) // BP).to(tl.float32)[:, None]  # pixels seen by each row
    total = tl.sum(mean * weights, axis=0) / count
    distance = mean - total[None, :]
    out = picture_tile.to(tl.int64) * channels + c
    tl.store(mean_ptr + out, total, mask=c < channels)
    tl.store(m2_ptr + out, tl.sum(m2 + weights * distance * distance, axis=0), mask=c < channels)


@triton.jit
def _block(block, channels, channels2, BC: tl.constexpr):
    blocks1 = tl.cdiv(channels, BC)
    second = block >= blocks1
    own = tl.where(second, block - blocks1, block) * BC + tl.arange(0, BC)
    return Block(second, own, own + tl.where(second, channels, 0), own < tl.where(second, channels2, channels))


@triton.jit
def _merge(known, known2, n, block, hw, TREE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """Return mean and M2, (BC,), of a `Block` of picture n, merged over all tiles in order, BT at a time.

    The sums are relative to the mean of the first tile. TREE: the order of the sums does not depend on the layout, so
    several kernels get the same bits.
    """
    mean_ptr, m2_ptr, channels, tiles, pixels = known.mean, known.m2, known.channels, known.tiles, known.pixels
    second, own, inside = block.second, block.own, block.inside
    if known2.mean is not None:
        mean_ptr, m2_ptr = tl.where(second, known2.mean, mean_ptr), tl.where(second, known2.m2, m2_ptr)
        tiles, pixels = tl.where(second, known2.tiles, tiles), tl.where(second, known2.pixels, pixels)
        channels = tl.where(second, known2.channels, channels)
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
    """Return a and b from the mean and M2 of channels that form whole, adjacent groups of WIDTH."""
    GROUPS: tl.constexpr = mean.numel // WIDTH
    members = mean.reshape(GROUPS, WIDTH)
    center = tree_sum(mean, GROUPS, WIDTH, 1) / WIDTH  # (GROUPS, 1)
    distance = (members - center).reshape(mean.shape)  # of a channel's mean from its group's mean
    total = tree_sum(m2 + pixels * distance * distance, GROUPS, WIDTH, 1)
    a = tl.broadcast_to(tl.rsqrt(total / (pixels * WIDTH) + eps), members.shape).reshape(mean.shape)
    return a, distance * a


@triton.jit
def modulate(a, b, affine, row, c, inside_c, inside):
    """Return a and b with the norm's weight and bias (channels c), and the scale and shift (pictures `row`), if any."""
    if affine.weight is not None:
        weight = tl.load(affine.weight + c, mask=inside_c, other=0.0).to(tl.float32)
        a, b = a * weight, b * weight + tl.load(affine.bias + c, mask=inside_c, other=0.0).to(tl.float32)
    if affine.scale is not None:
        scale = 1 + tl.load(affine.scale + row * affine.scale_stride + c, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(affine.shift + row * affine.shift_stride + c, mask=inside, other=0.0).to(tl.float32)
        a, b = a * scale, b * scale + shift
    return a, b


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    out_mean_ptr, out_m2_ptr, out_b_ptr, moments, moments2, norm, channels, channels2, tiles, tiles2, pixels, pixels2,
    hw, scale_stride, shift_stride, WHOLE: tl.constexpr, TREE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Merge all tiles of a picture for BC channels of a tensor, or of one of a pair: (N, C + C2) mean and M2.

    WHOLE: the group width if whole groups fill each program, else 0. If set, a and b are stored instead of M2.
    """
    await_inputs()
    known = TiledMoments(moments[0], moments[1], channels, tiles, pixels)
    known2 = TiledMoments(moments2[0], moments2[1], channels2, tiles2, pixels2)
    affine = Affine(norm[0], norm[1], norm[2], norm[3], norm[4], scale_stride, shift_stride)
    blocks = tl.cdiv(channels, BC) + tl.cdiv(channels2, BC)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    block = _block(tl.program_id(0) % blocks, channels, channels2, BC)
    mean, m2 = _merge(known, known2, n, block, hw, TREE, BT, BC)
    out = n * (channels + channels2) + block.c
    if WHOLE:
        m2, b = whole_groups(mean, m2, hw, affine.eps, WHOLE)
        m2, b = modulate(m2, b, affine, n, block.c, block.inside, block.inside)
        tl.store(out_b_ptr + out, b, mask=block.inside)
    tl.store(out_mean_ptr + out, mean, mask=block.inside)
    tl.store(out_m2_ptr + out, m2, mask=block.inside)


@triton.jit
def _load_pair(ptr, ptr2, known, known2, n, t, c, mask):
    """Load rows t and columns c of moments (N, tiles, C), or of a pair's concatenated moments; 0 where masked."""
    channels = known.channels
    values = tl.load(ptr + (n * known.tiles + t) * channels + c, mask=mask & (c < channels), other=0.0)
    if ptr2 is not None:
        c2 = c - channels
        values += tl.load(ptr2 + (n * known2.tiles + t) * known2.channels + c2, mask=mask & (c2 >= 0), other=0.0)
    return values


@triton.jit
def _any_groups(known, known2, n, block, hw, group_width, eps, BJ: tl.constexpr):
    """Return mean and a of each channel's group, in picture n. Groups may cross programs and the seam of a pair.

    Chan's formula over the tiles and channels of a group, BJ at a time in order, with sums relative to the mean of the
    first entry. That is one of the merged entries, so cancellation is bounded by their number.
    """
    group = block.c // group_width * group_width
    base = _load_pair(known.mean, known2.mean, known, known2, n, 0, group, block.inside)
    sums = tl.zeros_like(base)
    squares = tl.zeros_like(base)
    for start in range(0, tl.maximum(known.tiles, known2.tiles) * group_width, BJ):
        entry = start + tl.arange(0, BJ)[:, None]
        t, member = entry // group_width, group[None, :] + entry % group_width
        second = member >= known.channels
        mask = block.inside[None, :] & (t < tl.where(second, known2.tiles, known.tiles))
        covered = tl.where(second, known2.pixels, known.pixels)
        weights = tl.where(mask, tl.minimum(covered, hw - t * covered), 0).to(tl.float32)
        mean = _load_pair(known.mean, known2.mean, known, known2, n, t, member, mask)
        m2 = _load_pair(known.m2, known2.m2, known, known2, n, t, member, mask)
        distance = mean - base[None, :]
        sums += tl.sum(weights * distance, axis=0)
        squares += tl.sum(m2 + weights * distance * distance, axis=0)
    count = hw * group_width
    offset = sums / count
    return base + offset, tl.rsqrt(squares / count - offset * offset + eps)


@triton.jit
def _place(pid, x, x2, channels, channels2, hw, span, BP: tl.constexpr, BC: tl.constexpr):
    """Return a program's picture, first pixel and `Block` of channels.

    Also return, for its first BP pixels, the offsets in y, the pointers to x, and the pixel stride of x. x, x2: each a
    pointer, the stride of pictures and the stride of pixels.
    """
    width, blocks = channels + channels2, tl.cdiv(channels, BC) + tl.cdiv(channels2, BC)
    spans = tl.cdiv(hw, span)
    n, first = (pid // blocks // spans).to(tl.int64), pid // blocks % spans * span
    block = _block(pid % blocks, channels, channels2, BC)
    x_ptr, picture_stride, pixel_stride = x[0], x[1], x[2]
    if x2[0] is not None:
        x_ptr = tl.where(block.second, x2[0], x_ptr)
        picture_stride = tl.where(block.second, x2[1], picture_stride)
        pixel_stride = tl.where(block.second, x2[2], pixel_stride)
    rows = tl.arange(0, BP)[:, None]
    offset = (n * hw + first) * width + rows * width + block.c[None, :]
    x_ptrs = x_ptr + n * picture_stride + first.to(tl.int64) * pixel_stride + rows * pixel_stride + block.own[None, :]
    return n, first, block, offset, x_ptrs, pixel_stride


@triton.jit
def _load_temb(temb_ptr, temb_stride, n, block):
    """Load temb of picture n, (1, BC) float32, 0 if absent. Called early to hide the latency."""
    temb = tl.zeros(block.c.shape, tl.float32)
    if temb_ptr is not None:
        temb = tl.load(temb_ptr + n * temb_stride + block.c, mask=block.inside, other=0.0).to(tl.float32)
    return temb[None, :]


@triton.jit
def _store(y_ptr, offset, y, temb_ptr, temb, residual_ptr, inside):
    """Store y + temb + residual; temb and residual are optional."""
    if temb_ptr is not None:
        y += temb
    if residual_ptr is not None:
        y += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def normalise_kernel(
    y_ptr, x, x2, moments, moments2, norm, channels, channels2, merged, merged2, tiles, tiles2, pixels, pixels2,
    hw, group_width, scale_stride, shift_stride, temb, residual, temb_stride, span,
    ACTIVATION: tl.constexpr, WHOLE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Normalise `span` pixels of one picture and BC channels, all of the first tensor or all of the second.

    The moments are either those of each tensor, or merged into one, (N, 1, C + C2), for groups of any width.
    """
    await_inputs()
    affine = Affine(norm[0], norm[1], norm[2], norm[3], norm[4], scale_stride, shift_stride)
    n, first, block, offset, x_ptrs, pixel_stride = _place(
        tl.program_id(0), x, x2, channels, channels2, hw, span, BP, BC
    )  # fmt: skip
    stop = tl.minimum(first + span, hw)
    rows, there = tl.arange(0, BP)[:, None], block.inside[None, :]
    values = tl.load(x_ptrs, mask=(first + rows < stop) & there, other=0.0)  # in flight while the tiles are merged
    row = _load_temb(temb, temb_stride, n, block)

    if WHOLE:
        known = TiledMoments(moments[0], moments[1], channels, tiles, pixels)
        known2 = TiledMoments(moments2[0], moments2[1], channels2, tiles2, pixels2)
        mean, m2 = _merge(known, known2, n, block, hw, True, BJ, BC)
        a, b = whole_groups(mean, m2, hw, affine.eps, WHOLE)
    else:
        known = TiledMoments(moments[0], moments[1], merged, tiles, pixels)
        known2 = TiledMoments(moments2[0], moments2[1], merged2, tiles2, pixels2)
        mean, a = _any_groups(known, known2, n, block, hw, group_width, affine.eps, BJ)
        b = tl.zeros_like(a)
    a, b = modulate(a, b, affine, n, block.c, block.inside, block.inside)
    for start in range(first, stop, BP):
        x_ptrs += BP * pixel_stride
        following = tl.load(x_ptrs, mask=(start + BP + rows < stop) & there, other=0.0)
        y = activate(tl.fma(values.to(tl.float32) - mean[None, :], a[None, :], b[None, :]), ACTIVATION)
        _store(y_ptr, offset, y, temb, row, residual, (start + rows < stop) & there)
        offset += BP * (channels + channels2)
        values = following


@triton.jit(do_not_specialize=SIZES)
def apply_kernel(
    y_ptr, x, x2, mean_ptr, a_ptr, b_ptr, channels, channels2, hw, temb, residual, temb_stride,
    ACTIVATION: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise BP pixels given mean, a and b, each (N, C + C2).

    Programs run from the last pixel to the first: what the convolution wrote last is still in the cache, and so will be
    what the next one reads first.
    """
    await_inputs()
    n, first, block, out, x_ptrs, _ = _place(
        tl.num_programs(0) - 1 - tl.program_id(0), x, x2, channels, channels2, hw, BP, BP, BC
    )  # fmt: skip
    there = (first + tl.arange(0, BP) < hw)[:, None] & block.inside[None, :]
    values = tl.load(x_ptrs, mask=there, other=0.0)
    offset = n * (channels + channels2) + block.c
    mean = tl.load(mean_ptr + offset, mask=block.inside, other=0.0)
    a = tl.load(a_ptr + offset, mask=block.inside, other=0.0)
    b = tl.load(b_ptr + offset, mask=block.inside, other=0.0)
    y = activate(tl.fma(values.to(tl.float32) - mean[None, :], a[None, :], b[None, :]), ACTIVATION)
    _store(y_ptr, out, y, temb, _load_temb(temb, temb_stride, n, block), residual, there)
