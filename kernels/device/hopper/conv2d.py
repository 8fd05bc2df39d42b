"""The 3x3 convolution for sm_90: a warp-specialised, persistent, ping-pong kernel in the manner of CUTLASS GEMMs.

A producer warp loads pixels and weights with TMA; two consumer warpgroups multiply. Each warpgroup owns an output tile,
64 channels x (TH rows x 16 columns), and they take turns: while one multiplies, the other runs its epilogue (bias, time
embedding, residual, moments for the next norm, store).

- A load brings TH + 2 rows of 16 columns of 64 channels, starting at a tap's column. The three taps of that column read
  the same shared memory, each starting one row (16 pixels, 2 KB, whole swizzle atoms) further down, so three loads do
  the work of nine. TMA reads zeros outside the picture and writes nothing there.
- Channels are the M dimension: out^T = W X^T. The moments of a channel are therefore sums along a row of the
  accumulator, in registers plus two shuffles.
- With upsampling (nearest 2x before the filter), a tile lies in one of the output's four interleaved quarters, each of
  which filters the smaller input. One warpgroup computes even rows, the other odd rows.
- A 1x1 shortcut is added to the sum after the filter, with one load per product.
- In fp8 a load has 128 channels, the same number of bytes. Each product is summed separately, which needs registers, so
  both warpgroups share a tile, half of its rows each, and its loads; while one adds, the other multiplies.
- Values that a warp computes from the kernel arguments stay in its uniform registers, which TMA and wgmma use for
  addresses. Values computed before warp specialisation do not, so little is computed there.

Bits: the sum over k has the order (64 or 128 channels, column of the tap, row of the tap), so the bits of a picture and
of its moments depend neither on the batch nor on the tiles.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.hopper.conv2d_loads import Source, TileCounts, blocks_of, locate, produce, share, turns_of
from fastdiff.kernels.device.hopper.language import (
    async_load,
    async_store,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    pieces,
    reinterpret,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fastdiff.kernels.device.language import cuda

# One compiled variant serves all values of these.
SIZES = [
    "x_channels", "x2_channels", "shortcut_channels", "shortcut2_channels", "out_channels",
    "tiles", "whole", "across", "down", "wide", "moments_rows", "temb_stride", "scale",
]  # fmt: skip


class Outputs(NamedTuple):
    """The output and the residual, as descriptors for a tile and for half a tile, and pointers to the moments."""

    y: Any
    y_half: Any
    residual: Any
    residual_half: Any
    mean: Any
    m2: Any
    channels: Any
    moments_rows: Any  # tiles of moments down a picture, or down a quarter


class Epilogue(NamedTuple):
    """Per-channel terms that are added, and the scales."""

    bias: Any
    temb: Any
    temb_stride: Any
    shortcut_bias: Any
    scale: Any
    w_scale: Any  # for each output channel of an 8-bit weight; multiplies the sum over k first
    x_scale: Any  # for each picture, in fp8


class Depth(NamedTuple):
    """The number of channels of each input of the sum over k."""

    x: Any
    x2: Any
    shortcut: Any
    shortcut2: Any


@gluon.jit
def _multiply(
    acc, shared, load, product, loads,
    WG: gl.constexpr, TAPS: gl.constexpr, UP: gl.constexpr, FIRST: gl.constexpr, PASSES: gl.constexpr,
    ROWS: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr,
):  # fmt: skip
    """Add `loads` loads from `load` on, with TAPS products each from `product` on; return acc and the next product.

    Once a load's products are issued, those of the previous load are done, and its buffers are released. If weights
    have their own barriers, this happens per product. FIRST: the first row of a load to use. PASSES: pass the turn to
    the other warpgroup once the last product is issued.
    """
    B: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SIZE: gl.constexpr = shared.x.shape[0] // XS
    JOINT: gl.constexpr = WS == 3 * XS
    for at in range(load, load + loads):
        buffer = at % XS
        mbarrier.wait(shared.x_full.index(buffer), at // XS & 1)
        for r in gl.static_range(TAPS):
            slot = buffer * 3 + r if JOINT else product % WS
            if not JOINT:
                mbarrier.wait(shared.w_full.index(slot), product // WS & 1)
            # upsampled, two taps of a column read the same row; the parity of the output row decides which two
            rows = pieces(shared.x, buffer, SIZE, (r + 1 - WG) // 2 if UP else FIRST + r, ROWS)
            pixels = reinterpret(rows, shared.y.dtype, [ROWS * 16, 64], B)
            filters = reinterpret(shared.w.index(slot), shared.y.dtype, [64, 64], B)
            acc = warpgroup_mma(filters, pixels.permute((1, 0)), acc, is_async=True)
            if not JOINT:
                acc = warpgroup_mma_wait(1, deps=[acc])
                done = (at > load) | (r > 0)
                mbarrier.arrive(shared.w_free.index((product + WS - 1) % WS), count=1, pred=done)
                if r == 0:
                    mbarrier.arrive(shared.x_free.index((at + XS - 1) % XS), count=1, pred=at > load)
            product += 1
        if JOINT:
            acc = warpgroup_mma_wait(TAPS, deps=[acc])
            mbarrier.arrive(shared.x_free.index((at + XS - 1) % XS), count=1, pred=at > load)
    if PASSES:
        mbarrier.arrive(shared.turn.index(1 - WG), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if not JOINT:
        mbarrier.arrive(shared.w_free.index((product + WS - 1) % WS), count=1)
    mbarrier.arrive(shared.x_free.index((load + loads - 1) % XS), count=1)
    return acc, product


@gluon.jit
def _begin_fp8(
    shared, buffer, product: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, XS: gl.constexpr
):  # fmt: skip
    """Start a product of ROWS rows of a load from FIRST on, accumulated from zero."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * 16, 32])
    B: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    rows = pieces(shared.x, buffer, shared.x.shape[0] // XS, FIRST, ROWS)
    pixels = reinterpret(rows, shared.x.dtype, [ROWS * 16, 128], B)
    zeros = gl.zeros([64, ROWS * 16], gl.float32, L)
    return warpgroup_mma(shared.w.index(buffer * 3 + product), pixels.permute((1, 0)), zeros, is_async=True)


@gluon.jit
def _multiply_fp8(
    acc, shared, load, loads,
    UP: gl.constexpr, BELOW: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, XS: gl.constexpr,
):  # fmt: skip
    """Add `loads` loads from `load` on, with three products each, over ROWS of their rows from FIRST on.

    Tensor cores sum the 128 channels of a product from zero, in about 14 bits. Each sum is added to acc while the next
    product runs, and the last sum of a load while the other warpgroup multiplies.
    """
    for at in range(load, load + loads):
        buffer = at % XS
        mbarrier.wait(shared.x_full.index(buffer), at // XS & 1)
        sums = _begin_fp8(shared, buffer, 0, FIRST, ROWS, XS)
        for r in gl.static_range(1, 3):
            following = _begin_fp8(shared, buffer, r, FIRST + ((r + 1 - BELOW) // 2 if UP else r), ROWS, XS)
            acc += warpgroup_mma_wait(1, deps=[sums])
            sums = following
        done = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(shared.x_free.index(buffer), count=1)
        acc += done
    return acc


@gluon.jit
def _addend(epilogue, picture, n, channels, L: gl.constexpr):
    """Return bias + time embedding + the shortcut's bias, those given, for 64 channels from n on: (64,) float32."""
    channel = n + gl.arange(0, 64, L)
    inside = channel < channels
    addend = gl.zeros([64], gl.float32, L)
    if epilogue.bias is not None:
        addend += gl.load(epilogue.bias + channel, mask=inside, other=0.0).to(gl.float32)
    if epilogue.temb is not None:
        temb = epilogue.temb + picture.to(gl.int64) * epilogue.temb_stride
        addend += gl.load(temb + channel, mask=inside, other=0.0).to(gl.float32)
    if epilogue.shortcut_bias is not None:
        addend += gl.load(epilogue.shortcut_bias + channel, mask=inside, other=0.0).to(gl.float32)
    return addend


@gluon.jit
def _channel_factors(epilogue, n, channels, L: gl.constexpr):
    """Return the scales of an 8-bit weight for 64 channels from n on, (64, 1) float32."""
    channel = n + gl.arange(0, 64, gl.SliceLayout(1, L))
    return gl.expand_dims(gl.load(epilogue.w_scale + channel, mask=channel < channels, other=0.0), 1)


@gluon.jit
def _store_moments(acc, out, place, top, tiles, ROWS: gl.constexpr, PX: gl.constexpr, UP: gl.constexpr):
    """Store mean and M2 per channel and PX pixels of acc (64, ROWS 16), which is not rounded yet, from row `top` on."""
    PARTS: gl.constexpr = ROWS * 16 // PX
    parts = acc.reshape([64, PARTS, PX])
    mean = gl.sum(parts, 2) * (1 / PX)
    off = parts - gl.expand_dims(mean, 2)
    m2 = gl.sum(off * off, 2)
    S: gl.constexpr = mean.type.layout
    channel = gl.expand_dims(place.n + gl.arange(0, 64, gl.SliceLayout(1, S)), 1)
    row = gl.expand_dims(top // (PX // 16) + gl.arange(0, PARTS, gl.SliceLayout(0, S)), 0)
    first = place.picture.to(gl.int64)
    if UP:  # quarter by quarter
        first = first * 4 + place.below * 2 + place.right
    offset = ((first * out.moments_rows + row) * tiles.wide + place.column // 16) * out.channels + channel
    mask = (row < out.moments_rows) & (channel < out.channels)
    gl.store(out.mean + offset, mean, mask=mask)
    gl.store(out.m2 + offset, m2, mask=mask)


@gluon.jit
def _sum_tile(
    shared, turn, depth,
    WG: gl.constexpr, ROWS: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Wait for this warpgroup's turn, then return the sum over k of tile `turn`, (64, ROWS 16) float32."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * 16, 16])
    ADDED: gl.constexpr = depth.shortcut is not None
    loads = 3 * (blocks_of(depth.x, 64) + blocks_of(depth.x2, 64))
    later = blocks_of(depth.shortcut, 64) + blocks_of(depth.shortcut2, 64)  # one product each
    first = turn * (loads + later)
    product = turn * (loads * 3 + later)
    acc = gl.zeros([64, ROWS * 16], gl.float32, L)
    # wait until the other warpgroup has passed its barriers, because parity alone does not tell rounds apart
    mbarrier.wait(shared.turn.index(WG), turn // 2 & 1)
    acc, product = _multiply(
        acc, shared, first, product, loads, WG, 3, MODE == "up", 0, not ADDED, ROWS, XS, WS
    )  # fmt: skip
    if ADDED:
        acc, product = _multiply(
            acc, shared, first + loads, product, later, WG, 1, False, 0, True, ROWS, XS, WS
        )  # fmt: skip
    return acc


@gluon.jit
def _sum_tile_fp8(
    shared, turn, depth, epilogue, place, channels,
    WG: gl.constexpr, BELOW: gl.constexpr, ROWS: gl.constexpr, XS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """`_sum_tile` for this warpgroup's rows of a tile that both share, with scales applied. The shortcut is 16-bit."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * 16, 16])
    L8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * 16, 32])
    loads = 3 * (blocks_of(depth.x, 128) + blocks_of(depth.x2, 128))
    later = blocks_of(depth.shortcut, 64) + blocks_of(depth.shortcut2, 64)  # one product each
    first = turn * (loads + later)
    w_scale = _channel_factors(epilogue, place.n, channels, L)
    x_scale = gl.load(epilogue.x_scale + place.picture)
    acc = gl.zeros([64, ROWS * 16], gl.float32, L8)
    acc = _multiply_fp8(acc, shared, first, loads, MODE == "up", BELOW, WG * ROWS, ROWS, XS)
    acc = gl.convert_layout(acc, L)
    acc *= w_scale
    acc *= x_scale
    if depth.shortcut is not None:
        first += loads
        acc, _ = _multiply(acc, shared, first, first, later, WG, 1, False, WG * ROWS, False, ROWS, XS, 3 * XS)
    return acc


@gluon.jit
def _make_tile(
    y, residual, out, epilogue, shared, tiles, place, turn, depth,
    WG: gl.constexpr, BELOW: gl.constexpr, ROWS: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr, PX: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    """Compute a warpgroup's tile of ROWS rows. The epilogue runs while the other warpgroup multiplies.

    In fp8 these are the warpgroup's ROWS rows of a shared tile; with upsampling, BELOW says whether its rows are odd.
    """
    FP8: gl.constexpr = epilogue.x_scale is not None
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * 16, 16])
    B: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = shared.y.dtype
    row = place.row + WG * ROWS if FP8 else place.row
    mine = reinterpret(shared.y.index(WG), dtype, [ROWS * 16, 64], B)
    staged = reinterpret(shared.y.index(WG), dtype, y.block_shape, y.layout)
    if MODE == "up":  # y as (N, H / 2, 2, W / 2, 2 C)
        at = [place.picture, row, place.below, place.column, place.right * out.channels + place.n]
    else:
        at = [place.picture, row, place.column, place.n]
    if residual is not None:  # loaded into the output's buffer in advance
        store_wait(0)
        mbarrier.expect(shared.residual_full.index(WG), ROWS * 16 * 128)
        async_load(residual, at, shared.residual_full.index(WG), staged)
    addend = _addend(epilogue, place.picture, place.n, out.channels, gl.SliceLayout(1, L))
    if FP8:
        acc = _sum_tile_fp8(shared, turn, depth, epilogue, place, out.channels, WG, BELOW, ROWS, XS, MODE)
    else:
        acc = _sum_tile(shared, turn, depth, WG, ROWS, XS, WS, MODE)
        if epilogue.w_scale is not None:
            acc *= _channel_factors(epilogue, place.n, out.channels, L)
    acc += gl.expand_dims(addend, 1)
    if residual is not None:
        mbarrier.wait(shared.residual_full.index(WG), (turn if FP8 else turn // 2) & 1)
        acc += mine.permute((1, 0)).load(L).to(gl.float32)
    else:
        store_wait(0)
    if epilogue.scale is not None:
        acc *= epilogue.scale
    mine.permute((1, 0)).store(acc.to(dtype))
    fence_async_shared()
    async_store(y, at, staged)
    if PX > 0:
        _store_moments(acc, out, place, row, tiles, ROWS, PX, MODE == "up")


@gluon.jit
def _consume(
    out, epilogue, shared, tiles, depth,
    WG: gl.constexpr, TH: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr, PX: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: every second tile of this program; in fp8, half the rows of each tile."""
    cuda.gdc_wait()  # this kernel may have started before the one that computes its inputs ended
    FP8: gl.constexpr = epilogue.x_scale is not None
    ROWS: gl.constexpr = TH // 2 if FP8 else TH
    HALF: gl.constexpr = ROWS // 2
    TURNS: gl.constexpr = 2 if FP8 and MODE == "up" else 1  # per iteration; they alternate between even and odd rows
    for first in range(0 if FP8 else WG, turns_of(tiles, MODE == "up"), TURNS if FP8 else 2):
        for BELOW in gl.static_range(TURNS):
            turn = first + BELOW
            place = locate(turn, tiles, TH, MODE == "up")
            if out.y_half is None:
                _make_tile(
                    out.y, out.residual, out, epilogue, shared, tiles, place, turn, depth,
                    WG, BELOW, ROWS, XS, WS, PX, MODE,
                )  # fmt: skip
            else:
                if place.half:
                    _make_tile(
                        out.y_half, out.residual_half, out, epilogue, shared, tiles, place, turn, depth,
                        WG, BELOW, HALF, XS, WS, PX, MODE,
                    )  # fmt: skip
                else:
                    _make_tile(
                        out.y, out.residual, out, epilogue, shared, tiles, place, turn, depth,
                        WG, BELOW, ROWS, XS, WS, PX, MODE,
                    )  # fmt: skip
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_conv(
    y, y_half, residual, residual_half, mean, m2,
    x, x_half, x_edge, x2, x2_half, x2_edge, w,
    shortcut, shortcut_half, shortcut2, shortcut2_half, shortcut_w,
    bias, temb, temb_stride, shortcut_bias, scale, w_scale, x_scale,
    x_channels, x2_channels, shortcut_channels, shortcut2_channels, out_channels,
    tiles, whole, across, down, wide, moments_rows,
    MODE: gl.constexpr, TH: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr, PX: gl.constexpr,
):  # fmt: skip
    """Compute the convolution. Unused inputs, moments and numbers of channels are None.

    XS, WS: number of buffers of loads and of weights. PX: pixels per tile of moments.
    """
    shared = share(x.dtype, y.dtype, w.block_shape[2], TH, XS, WS)
    source, source2 = Source(x, x_half, x_edge, x_channels), Source(x2, x2_half, x2_edge, x2_channels)
    added = Source(shortcut, shortcut_half, None, shortcut_channels)
    added2 = Source(shortcut2, shortcut2_half, None, shortcut2_channels)
    output_tiles = TileCounts(tiles, whole, across, down, wide)
    out = Outputs(y, y_half, residual, residual_half, mean, m2, out_channels, moments_rows)
    epilogue = Epilogue(bias, temb, temb_stride, shortcut_bias, scale, w_scale, x_scale)
    depth = Depth(x_channels, x2_channels, shortcut_channels, shortcut2_channels)
    WG0: gl.constexpr = 0
    WG1: gl.constexpr = 1
    # spelled out: in a tuple built beforehand, numbers would not stay constexpr
    gl.warp_specialize([
        (_consume, (out, epilogue, shared, output_tiles, depth, WG0, TH, XS, WS, PX, MODE)),
        (_consume, (out, epilogue, shared, output_tiles, depth, WG1, TH, XS, WS, PX, MODE)),
        (produce, (source, source2, w, added, added2, shortcut_w, shared, output_tiles, TH, XS, WS, MODE)),
    ], [4, 1], [240, 24])  # fmt: skip
