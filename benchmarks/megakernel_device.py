"""A chain of convolutions and norms of one picture as one persistent kernel with a barrier across the grid.

The chain is a table of stages in memory, (stages + 2, FIELDS) int64, the last two rows zero. A row is the stage's kind,
the number of its tasks, the fields of its kind, pointers as numbers, and from WEIGHT on what to ask for while waiting.
Every program takes its share of the tasks:

- `Products`: a convolution 3x3 as an implicit matrix product, k cut into slices, so that 64 pixels fill the card too. A
  task is one slice of 64 pixels x 32 channels: a partial sum in float32.
- `Combine`: the partial sums in order, bias, time embedding and residual; then GroupNorm and SiLU. A task is all pixels
  of 16 channels, whole groups, so that mean and M2 are its own.

No stage reads what another program wrote in the same stage, so that one barrier after each is all the order there is.
The slices of k depend on the picture's shape alone.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import activate, await_inputs, prefetch

FIELDS = tl.constexpr(24)
PRODUCTS, COMBINE = tl.constexpr(1), tl.constexpr(2)  # kinds of a stage
WEIGHT = tl.constexpr(17)  # where a row has the address of the weights that a stage reads, and their bytes halved
PIXELS, CHANNELS, DEPTH = tl.constexpr(64), tl.constexpr(32), tl.constexpr(64)  # of a step of a task of `Products`
COMBINED = tl.constexpr(16)  # channels of a task of `Combine`
UNIT = tl.constexpr(16)  # channels that the table counts as one
HELD = tl.constexpr(1024)  # pixels x partial sums that a task of `Combine` loads at once


class Products(NamedTuple):
    """A convolution of x (side_in, side_in, channels) to partial sums (slices, side, side, out_channels).

    side is 2 ** side_bits.
    """

    x: Any
    weight: Any  # (out_channels, 3, 3, channels)
    shortcut: Any  # (side, side, shortcut_channels), of which a 1x1 convolution is added, or 0
    shortcut_weight: Any  # (out_channels, shortcut_channels)
    partial: Any
    side_in: Any
    channels: Any
    shortcut_channels: Any  # 0: no shortcut
    side_bits: Any
    out_channels: Any
    slices: Any
    steps: Any  # of a slice, each a filter tap and DEPTH channels
    stride: Any
    doubled: Any  # 1: each pixel of x is repeated 2 x 2 before the convolution
    pad: Any  # zeros above and left


class Combine(NamedTuple):
    """The sum of partial (slices, pixels, channels) and what follows, beside a skip connection read from memory."""

    partial: Any
    slices: Any  # 0: the residual alone
    pixels: Any
    channels: Any
    bias: Any  # (channels,) or 0, as all below
    shortcut_bias: Any
    temb: Any  # (channels,)
    residual: Any  # (pixels, channels)
    skip: Any  # (pixels, skip_channels)
    skip_channels: Any
    raw: Any  # out: (pixels, channels + skip_channels), the sum and the skip connection side by side
    normed: Any  # out: the same through GroupNorm and SiLU
    group: Any  # channels of a group: divides COMBINED
    norm_weight: Any  # (channels + skip_channels,)
    norm_bias: Any


@triton.jit
def _words(row):
    """A row of the table."""
    return (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5),
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11),
        tl.load(row + 12), tl.load(row + 13), tl.load(row + 14), tl.load(row + 15), tl.load(row + 16),
    )  # fmt: skip


@triton.jit
def _number(word):
    return word.to(tl.int32)


@triton.jit
def _channels(word):
    """A number of channels: the table counts them in sixteens, so that the compiler sees how loads are aligned."""
    return word.to(tl.int32) * UNIT


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    """A pointer to memory that begins at a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _products_of(words):
    return Products(
        words[2], words[3], words[4], words[5], words[6], _number(words[7]), _channels(words[8]), _channels(words[9]),
        _number(words[10]), _channels(words[11]), _number(words[12]), _number(words[13]), _number(words[14]),
        _number(words[15]), _number(words[16]),
    )  # fmt: skip


@triton.jit
def _combine_of(words):
    return Combine(
        words[2], _number(words[3]), _number(words[4]), _channels(words[5]), words[6], words[7], words[8], words[9],
        words[10], _channels(words[11]), words[12], words[13], _number(words[14]), words[15], words[16],
    )  # fmt: skip


@triton.jit
def _multiply(job, task, DTYPE: tl.constexpr):
    """One slice of k of PIXELS pixels x CHANNELS channels."""
    across, pixels = job.out_channels // CHANNELS, 1 << (2 * job.side_bits)
    n = task % across * CHANNELS + tl.arange(0, CHANNELS)
    part = task // across % job.slices
    pixel = task // across // job.slices * PIXELS + tl.arange(0, PIXELS)
    h = (pixel >> job.side_bits) * job.stride - job.pad
    w = (pixel & ((1 << job.side_bits) - 1)) * job.stride - job.pad
    inside_picture, limit = pixel < pixels, job.side_in << job.doubled
    blocks = job.channels // DEPTH
    first, main = part * job.steps, 9 * blocks
    lane = tl.arange(0, DEPTH)

    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for step in tl.range(first, tl.minimum(first + job.steps, main + job.shortcut_channels // DEPTH)):
        joins = step >= main  # the shortcut's steps follow the filter's
        tap = tl.where(joins, 3 * job.pad + job.pad, step // blocks)
        c = tl.where(joins, step - main, step % blocks) * DEPTH
        channels = tl.where(joins, job.shortcut_channels, job.channels)
        x = _pointer(tl.where(joins, job.shortcut, job.x), DTYPE)
        weight = _pointer(tl.where(joins, job.shortcut_weight, job.weight), DTYPE)
        k, length = tl.where(joins, 0, tap * channels) + c, tl.where(joins, channels, 9 * channels)
        row, column = h + tap // 3, w + tap % 3
        inside = inside_picture & (row >= 0) & (row < limit) & (column >= 0) & (column < limit)
        at = (row >> job.doubled) * job.side_in + (column >> job.doubled)
        tile = tl.load(x + (at * channels)[:, None] + (c + lane)[None, :], mask=inside[:, None], other=0.0)
        filters = tl.load(weight + (n * length)[:, None] + (k + lane)[None, :])
        if tile.dtype == tl.float32:  # one long sum would lose digits, and the compiler makes one of a dot and a +
            acc = tl.fma(tl.dot(tile, filters.T, input_precision="ieee"), 1.0, acc)
        else:
            acc = tl.dot(tile, filters.T, acc)

    partial = _pointer(job.partial, tl.float32) + part * pixels * job.out_channels
    tl.store(partial + (pixel * job.out_channels)[:, None] + n[None, :], acc, mask=inside_picture[:, None])


@triton.jit
def _load_row(address, c, DTYPE: tl.constexpr):
    """(COMBINED,) float32, of channels c; zeros where the address is 0."""
    there = tl.arange(0, COMBINED) < tl.where(address != 0, COMBINED, 0)
    return tl.load(_pointer(address, DTYPE) + c, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _group_norm(x, inside, job, c, weight, bias, eps):
    """x (ROWS, COMBINED) through GroupNorm and SiLU, of its pixels inside; c (COMBINED,) its channels.

    As in `kernels.group_norm`: a mean and M2 of each channel, merged by Chan's formula.
    """
    mean = tl.sum(tl.where(inside, x, 0.0), axis=0) / job.pixels
    off = tl.where(inside, x - mean[None, :], 0.0)
    m2 = tl.sum(off * off, axis=0)
    together = c[:, None] // job.group == c[None, :] // job.group
    distance = mean - tl.sum(tl.where(together, mean[None, :], 0.0), axis=1) / job.group
    total = tl.sum(tl.where(together, (m2 + job.pixels * distance * distance)[None, :], 0.0), axis=1)
    a = tl.rsqrt(total / (job.pixels * job.group) + eps) * weight
    return activate(off * a[None, :] + (distance * a + bias)[None, :], "silu")


@triton.jit
def _combine(job, task, eps, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """All pixels, at most ROWS, of COMBINED channels: of the sum, or after them of the skip connection."""
    c, pixel = tl.arange(0, COMBINED) + task * COMBINED, tl.arange(0, ROWS)
    skips = job.channels <= task * COMBINED
    own = tl.arange(0, COMBINED) + (task - tl.where(skips, job.channels // COMBINED, 0)) * COMBINED
    inside = (pixel < job.pixels)[:, None]
    slices, length = tl.where(skips, 0, job.slices), tl.where(skips, job.skip_channels, job.channels)
    offset = (pixel * length)[:, None] + own[None, :]
    weight, norm_bias = _load_row(job.norm_weight, c, DTYPE), _load_row(job.norm_bias, c, DTYPE)
    partial = _pointer(job.partial, tl.float32)
    x = tl.zeros((ROWS, COMBINED), tl.float32)
    for part in tl.static_range(HELD // ROWS):  # past L1, which may hold what was there before
        there = (pixel < tl.where(slices > part, job.pixels, 0))[:, None]
        x += tl.load(partial + offset, mask=there, other=0.0, cache_modifier=".cg")
        partial += job.pixels * length
    bias, shortcut_bias = tl.where(skips, 0, job.bias), tl.where(skips, 0, job.shortcut_bias)
    temb, residual = tl.where(skips, 0, job.temb), tl.where(skips, job.skip, job.residual)
    x += (_load_row(bias, own, DTYPE) + _load_row(shortcut_bias, own, DTYPE) + _load_row(temb, own, DTYPE))[None, :]
    there = (pixel < tl.where(residual != 0, job.pixels, 0))[:, None]
    x += tl.load(_pointer(residual, DTYPE) + offset, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    out = (pixel * (job.channels + job.skip_channels))[:, None] + c[None, :]
    if job.raw != 0:
        tl.store(_pointer(job.raw, DTYPE) + out, x.to(DTYPE), mask=inside)
    if job.normed != 0:
        y = _group_norm(x, inside, job, c, weight, norm_bias, eps)
        tl.store(_pointer(job.normed, DTYPE) + out, y.to(DTYPE), mask=inside)


@triton.jit
def _ask_for_weights(row):
    """The weights of the stage at `row` of the table begin to come to L2; other stages have none."""
    prefetch(_pointer(tl.load(row + WEIGHT), tl.float16), _number(tl.load(row + WEIGHT + 1)))


@triton.jit
def _arrive(counter):
    """Count this program in. All that its threads wrote comes before that."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _await(counter, target):
    """Wait until the counter is there: every thread for itself, so that to each all is visible that came before."""
    count = target - 1
    while count < target:
        count = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s64 $0, [$1];", "=l,l", [counter], tl.int64, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["first", "last"])
def chain_kernel(table, counter, first, last, eps, DTYPE: tl.constexpr, PERSISTENT: tl.constexpr):
    """Stages `first` to `last` of the table. PERSISTENT: a barrier across the grid between them, else one stage only.

    All programs must fit the card at once. The counter only grows, and so needs no reset between launches: a launch
    adds programs x stages, its first count to find where it begins, and 64 bits last. It belongs to one table.
    """
    _ask_for_weights(table + first * FIELDS)
    await_inputs()
    if PERSISTENT:
        programs, counts = tl.num_programs(0), tl.num_programs(0) * (last - first)
        start = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") // counts * counts
        _ask_for_weights(table + (first + 1) * FIELDS)
    for stage in range(first, last):
        row = table + stage * FIELDS
        words = _words(row)  # on their way before the wait
        if PERSISTENT and stage > first:
            _await(counter, start + (stage - first + 1) * programs)
        if words[0] == PRODUCTS:
            products = _products_of(words)
            for task in range(tl.program_id(0), _number(words[1]), tl.num_programs(0)):
                _multiply(products, task, DTYPE)
        else:
            combine = _combine_of(words)
            for task in range(tl.program_id(0), _number(words[1]), tl.num_programs(0)):
                if combine.pixels <= 64:
                    _combine(combine, task, eps, 64, DTYPE)
                else:
                    _combine(combine, task, eps, 256, DTYPE)
        if PERSISTENT and stage + 1 < last:
            _arrive(counter)
            _ask_for_weights(row + 2 * FIELDS)
