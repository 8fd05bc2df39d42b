"""The producer side of the convolution for sm_90: shared memory, the place of each tile, and the warp that loads.

`device.hopper.conv2d` describes the kernel.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.hopper.language import (
    async_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    pieces,
    reinterpret,
)
from fastdiff.kernels.device.language import cuda


class Source(NamedTuple):
    """Descriptors of one input: for a tile's rows, for half of them, and for the rows below that taps read."""

    whole: Any
    half: Any
    edge: Any
    channels: Any


class Shared(NamedTuple):
    """The shared memory of a program: pixels, weights, output, and the barriers `full`, `free` and `turn`."""

    x: Any  # (XS (TH + 2), 16, BK), XS loads; BK channels per step: 64, in fp8 128
    w: Any  # (WS, 64, BK)
    y: Any  # (2, rows of a warpgroup 16, 64), first for the residual, then for the output
    x_full: Any  # per load, including its weights if WS has three per load
    x_free: Any
    w_full: Any  # otherwise per product, for its weights
    w_free: Any
    residual_full: Any
    turn: Any


class TileCounts(NamedTuple):
    """Numbers of output tiles. Tiles from index `whole` on have TH / 2 rows."""

    number: Any
    whole: Any
    across: Any  # tiles along the channels; upsampled, those of left and of right pixels
    down: Any
    wide: Any


class Place(NamedTuple):
    """The first element of a tile."""

    picture: Any
    row: Any
    column: Any
    n: Any  # channel
    below: Any  # upsampled: whether it has the odd rows
    right: Any  # upsampled: whether it has the odd columns
    half: Any  # whether it is half a tile


class Pixel(NamedTuple):
    """The first pixel of a load."""

    row: Any
    column: Any


@gluon.jit
def share(
    dtype: gl.constexpr, out_dtype: gl.constexpr, BK: gl.constexpr, TH: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr
):  # fmt: skip
    """Allocate the `Shared` memory of a program and initialise its barriers; the first warpgroup has the first turn."""
    READERS: gl.constexpr = BK // 64  # warpgroups that read a load
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    IN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=1024 // BK, rank=2)
    OUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x = gl.allocate_shared_memory(dtype, [XS * (TH + 2), 16, BK], IN)
    w = gl.allocate_shared_memory(dtype, [WS, 64, BK], IN)
    y = gl.allocate_shared_memory(out_dtype, [2, TH // READERS * 16, 64], OUT)
    x_full = gl.allocate_shared_memory(gl.int64, [XS, 1], BARRIER)
    x_free = gl.allocate_shared_memory(gl.int64, [XS, 1], BARRIER)
    residual_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(XS):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_free.index(i), count=READERS)
    w_full, w_free = x_full, x_free
    if WS < 3 * XS:
        w_full = gl.allocate_shared_memory(gl.int64, [WS, 1], BARRIER)
        w_free = gl.allocate_shared_memory(gl.int64, [WS, 1], BARRIER)
        for i in gl.static_range(WS):
            mbarrier.init(w_full.index(i), count=1)
            mbarrier.init(w_free.index(i), count=READERS)
    for i in gl.static_range(2):
        mbarrier.init(residual_full.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    return Shared(x, w, y, x_full, x_free, w_full, w_free, residual_full, turn)


@gluon.jit
def turns_of(tiles, UP: gl.constexpr):
    """Return the number of turns of this program: its tiles, which warpgroups take in turn; upsampled, two per tile."""
    count = (tiles.number - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    return count * 2 if UP else count


@gluon.jit
def locate(turn, tiles, TH: gl.constexpr, UP: gl.constexpr):
    """Return the `Place` of this program's tile in a turn."""
    below = turn % 2 if UP else 0
    tile = gl.program_id(0) + (turn // 2 if UP else turn) * gl.num_programs(0)
    rest = gl.maximum(tile - tiles.whole, 0)
    unit = gl.minimum(tile, tiles.whole) + rest // 2
    pixels, channels = unit // tiles.across, unit % tiles.across
    rows, column = pixels // tiles.wide, pixels % tiles.wide * 16
    picture, row = rows // tiles.down, rows % tiles.down * TH + rest % 2 * (TH // 2)
    across = tiles.across // 2 if UP else tiles.across
    n, right = channels % across * 64, channels // across if UP else 0
    return Place(picture, row, column, n, below, right, tile >= tiles.whole)


@gluon.jit
def blocks_of(channels, BK: gl.constexpr):
    """Return the number of blocks of BK channels; 0 for an absent input."""
    if channels is None:
        return 0
    else:
        return (channels + BK - 1) // BK


@gluon.jit
def _tap(place, j, MODE: gl.constexpr):
    """Return the `Pixel` that a tile's first pixel reads at tap (0, j)."""
    if MODE == "up":
        return Pixel(place.row + ((place.below - 1) >> 1), place.column + ((place.right + j - 1) >> 1))
    else:
        return Pixel(place.row - 1, place.column + j - 1)


@gluon.jit
def _load_rows(x, into, full, picture, pixel, c, DOWN: gl.constexpr):
    """Load rows of pixels, from `DOWN` rows below `pixel` on, for a block of channels from c on."""
    into = reinterpret(into, x.dtype, x.block_shape, x.layout)
    async_load(x, [picture, pixel.row + DOWN, pixel.column, c], full, into)


@gluon.jit
def _load_pixels(
    x, source, shared, place, buffer, full, pixel, c, XS: gl.constexpr, EDGE: gl.constexpr, WEIGHTS: gl.constexpr
):  # fmt: skip
    """Load a tile's rows, with descriptor x, and EDGE more: two loads, because a load's rows are a power of two.

    WEIGHTS: number of blocks of weights that follow on the same barrier.
    """
    ROWS: gl.constexpr = x.block_shape[1]
    SIZE: gl.constexpr = shared.x.shape[0] // XS
    mbarrier.expect(full, (ROWS + EDGE) * 16 * 128 + WEIGHTS * 64 * 128)
    _load_rows(x, pieces(shared.x, buffer, SIZE, 0, ROWS), full, place.picture, pixel, c, 0)
    if EDGE > 0:
        into = pieces(shared.x, buffer, SIZE, ROWS, EDGE)
        _load_rows(source.edge, into, full, place.picture, pixel, c, ROWS)


@gluon.jit
def _load_source(
    source, w, shared, place, load, product, offset,
    POINT: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Issue all loads of a source, each as soon as its buffer is free; return the next load's and product's index.

    POINT: a 1x1 convolution: each load takes the next channels and has one product, not three.
    offset: the index of the source's first channel in the weight.
    """
    PRODUCTS: gl.constexpr = 1 if POINT else 3
    COLUMNS: gl.constexpr = 1 if POINT else 3
    EDGE: gl.constexpr = 0 if POINT else source.edge.block_shape[1]
    BK: gl.constexpr = w.block_shape[2]
    JOINT: gl.constexpr = WS == 3 * XS
    WEIGHTS: gl.constexpr = PRODUCTS if JOINT else 0
    for k in range(blocks_of(source.channels, BK) * COLUMNS):
        c, j = k // COLUMNS * BK, k % COLUMNS
        pixel = Pixel(place.row, place.column) if POINT else _tap(place, j, MODE)
        buffer = load % XS
        full = shared.x_full.index(buffer)
        mbarrier.wait(shared.x_free.index(buffer), (load // XS & 1) ^ 1)
        if source.half is None:
            _load_pixels(source.whole, source, shared, place, buffer, full, pixel, c, XS, EDGE, WEIGHTS)
        else:
            if place.half:
                _load_pixels(source.half, source, shared, place, buffer, full, pixel, c, XS, EDGE, WEIGHTS)
            else:
                _load_pixels(source.whole, source, shared, place, buffer, full, pixel, c, XS, EDGE, WEIGHTS)
        load += 1
        for r in gl.static_range(PRODUCTS):
            slot = buffer * 3 + r if JOINT else product % WS
            if not JOINT:
                full = shared.w_full.index(slot)
                mbarrier.wait(shared.w_free.index(slot), (product // WS & 1) ^ 1)
                mbarrier.expect(full, 64 * 128)
            into = reinterpret(shared.w.index(slot), w.dtype, w.block_shape, w.layout)
            tap = 0 if POINT else r * 3 + j
            async_load(w, [place.n, tap, offset + c], full, into)
            product += 1
    return load, product


@gluon.jit
def produce(
    x, x2, w, shortcut, shortcut2, shortcut_w, shared, tiles,
    TH: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Producer warp: load the pixels and weights of one tile after another.

    The next kernel may start early only if this one leaves it half of an H200. Otherwise all programs of a small kernel
    would run on the few multiprocessors that finish first.
    """
    HALF_OF_A_CARD: gl.constexpr = 66
    cuda.gdc_wait()
    if gl.num_programs(0) <= HALF_OF_A_CARD:
        cuda.gdc_launch_dependents()
    load = 0
    product = 0
    for turn in range(turns_of(tiles, MODE == "up")):
        place = locate(turn, tiles, TH, MODE == "up")
        load, product = _load_source(
            x, w, shared, place, load, product, 0, False, XS, WS, MODE
        )  # fmt: skip
        if x2.whole is not None:
            load, product = _load_source(
                x2, w, shared, place, load, product, x.channels, False, XS, WS, MODE
            )  # fmt: skip
        if shortcut.whole is not None:
            load, product = _load_source(
                shortcut, shortcut_w, shared, place, load, product, 0, True, XS, WS, MODE
            )  # fmt: skip
        if shortcut2.whole is not None:
            load, product = _load_source(
                shortcut2, shortcut_w, shared, place, load, product, shortcut.channels, True, XS, WS, MODE
            )  # fmt: skip
