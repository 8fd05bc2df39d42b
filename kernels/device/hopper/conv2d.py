"""The 3x3 convolution for sm_90: warp-specialised, persistent, ping-pong, as CUTLASS's matrix products are.

One warp asks the copy engine for pixels and weights; two warpgroups multiply. Each owns a tile of the output, 64
channels x (TH rows x 16 columns), and they take turns: while one multiplies, the other ends its tile (bias, time
embedding, residual, moments for the next norm, store).

- A load brings, of 64 channels, TH + 2 rows of 16 columns, begun at a tap's column; the three taps of that column read
  the same shared memory, each begun a row (16 pixels, 2 KB, whole swizzle atoms) further down. So three loads do the
  work of nine. Outside the picture the copy engine reads zeros, and it writes nothing there.
- The channels are on the matrix unit's M side: out^T = W X^T. So the moments of a channel are sums along a row of the
  accumulator, in registers and two shuffles.
- Upsampled (nearest 2x before the filter), a tile is of one of the output's four interleaved quarters, each a filter of
  the smaller input; one warpgroup makes even rows, the other odd ones.
- A 1x1 shortcut joins the sum after the filter, a load for each product.
- In fp8 a load is of 128 channels, as many bytes. Each product is a sum of its own, which needs registers: so both
  warpgroups make one tile, each half of its rows, from the same loads; while one adds, the other multiplies.
- What a warp computes from the kernel's own arguments stays in its uniform registers, from which the copy engine and
  the matrix unit take their addresses; what is computed before the warps part does not. So little is.

Bits: the sum over k is in the order (64 or 128 channels, column of the tap, row of the tap); so the bits of a picture
and of its moments depend neither on the batch nor on the tiles.
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

# Numbers of which one compiled variant serves all values.
SIZES = [
    "x_channels", "x2_channels", "shortcut_channels", "shortcut2_channels", "out_channels",
    "tiles", "whole", "across", "down", "wide", "moments_rows", "temb_stride", "scale",
]  # fmt: skip


class Outputs(NamedTuple):
    """The output and the residual by descriptors of a tile and of half a tile, and pointers to its moments."""

    y: Any
    y_half: Any
    residual: Any
    residual_half: Any
    mean: Any
    m2: Any
    channels: Any
    moments_rows: Any  # tiles of moments down a picture, or down a quarter


class Epilogue(NamedTuple):
    """Rows of channels that are added, and the factor after them."""

    bias: Any
    temb: Any
    temb_stride: Any
    shortcut_bias: Any
    scale: Any
    w_scale: Any  # of a weight in 8 bits, of each output channel: the first factor of the sum over k
    x_scale: Any  # in fp8, of each picture


class Depth(NamedTuple):
    """The channels of each picture of the sum over k."""

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
    """acc plus `loads` loads from `load` on, of TAPS products each, the first of them `product`; and the next one.

    When a load's products have begun, those of the load before are done, and its buffers are free; or, where weights
    have barriers of their own, when a product has begun, the one before. FIRST: row of a load. PASSES: when the last
    has begun, it is the other warpgroup's turn.
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
            # upsampled, two taps of a column are of the same row; which two, the parity of the output's row says
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
    """A product of a load, of ROWS of its rows from FIRST on, from zero: under way."""
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
    """acc plus `loads` loads from `load` on, of three products each, of ROWS rows of them from FIRST on.

    The matrix unit sums the 128 channels of a product from zero, in some 14 bits. Each sum is added to acc while the
    next one is made; the last of a load, while the other warpgroup multiplies.
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
    """(64,) float32 from channel n on: bias, time embedding and the shortcut's bias, where there are any."""
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
    """(64, 1) float32 of a weight in 8 bits, from channel n on."""
    channel = n + gl.arange(0, 64, gl.SliceLayout(1, L))
    return gl.expand_dims(gl.load(epilogue.w_scale + channel, mask=channel < channels, other=0.0), 1)


@gluon.jit
def _store_moments(acc, out, place, top, tiles, ROWS: gl.constexpr, PX: gl.constexpr, UP: gl.constexpr):
    """Mean and M2 of each channel over each PX pixels of acc (64, ROWS 16), from row `top` on, before it is rounded."""
    PARTS: gl.constexpr = ROWS * 16 // PX
    parts = acc.reshape([64, PARTS, PX])
    mean = gl.sum(parts, 2) * (1 / PX)
    off = parts - gl.expand_dims(mean, 2)
    m2 = gl.sum(off * off, 2)
    S: gl.constexpr = mean.type.layout
    channel = gl.expand_dims(place.n + gl.arange(0, 64, gl.SliceLayout(1, S)), 1)
    row = gl.expand_dims(top // (PX // 16) + gl.arange(0, PARTS, gl.SliceLayout(0, S)), 0)
    first = place.picture.to(gl.int64)
    if UP:  # a quarter after another
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
    """(64, ROWS 16) float32, the sum over k of the program's `turn`-th tile, when it is this warpgroup's turn."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * 16, 16])
    ADDED: gl.constexpr = depth.shortcut is not None
    loads = 3 * (blocks_of(depth.x, 64) + blocks_of(depth.x2, 64))
    later = blocks_of(depth.shortcut, 64) + blocks_of(depth.shortcut2, 64)  # of one product each
    first = turn * (loads + later)
    product = turn * (loads * 3 + later)
    acc = gl.zeros([64, ROWS * 16], gl.float32, L)
    # this one looks at the barriers only when the other has passed its own: parity alone does not tell rounds apart
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
    """`_sum_tile` of this warpgroup's rows of a tile that both make, by its scales. The shortcut has 16 bits."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * 16, 16])
    L8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * 16, 32])
    loads = 3 * (blocks_of(depth.x, 128) + blocks_of(depth.x2, 128))
    later = blocks_of(depth.shortcut, 64) + blocks_of(depth.shortcut2, 64)  # of one product each
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
    """A warpgroup's tile of ROWS rows; all after its sum is done while the other multiplies.

    In fp8, its ROWS rows of a tile that both make; upsampled, BELOW says in a constant whether of the odd rows.
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
    if residual is not None:  # into the buffer of the output, where it waits for the sum
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
    """One warpgroup: every second tile of this program; in fp8, half the rows of each."""
    cuda.gdc_wait()  # it may have begun before the kernel that makes its inputs has ended
    FP8: gl.constexpr = epilogue.x_scale is not None
    ROWS: gl.constexpr = TH // 2 if FP8 else TH
    HALF: gl.constexpr = ROWS // 2
    TURNS: gl.constexpr = 2 if FP8 and MODE == "up" else 1  # an iteration, which alternate between even and odd rows
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
    """Pictures, rows and moments that are not there are None, as are their channels.

    XS, WS: buffers of loads, of weights. PX: pixels of a tile of moments.
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
    # written out: a tuple made beforehand would lose that its numbers are constants
    gl.warp_specialize([
        (_consume, (out, epilogue, shared, output_tiles, depth, WG0, TH, XS, WS, PX, MODE)),
        (_consume, (out, epilogue, shared, output_tiles, depth, WG1, TH, XS, WS, PX, MODE)),
        (produce, (source, source2, w, added, added2, shortcut_w, shared, output_tiles, TH, XS, WS, MODE)),
    ], [4, 1], [240, 24])  # fmt: skip
