"""The loads of the convolution for sm_90: its shared memory, the place of each tile, and the warp that fills it.

`device.hopper.conv2d` describes the whole.
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


class Source(NamedTuple):
    """A picture of the sum over k by its descriptors: of a tile's rows, of half of them, of the two rows after."""

    whole: Any
    half: Any
    edge: Any
    channels: Any
    offset: Any  # of its first channel in the weight


class Shared(NamedTuple):
    """The shared memory of a program: pixels, weights, output; and the barriers that say full, free, and whose turn."""

    x: Any  # (3 (TH + 2), 16, 64), three loads
    w: Any  # (WS, 64, 64)
    y: Any  # (2, TH 16, 64), the residual's before the output's
    x_full: Any
    x_free: Any
    w_full: Any
    w_free: Any
    residual_full: Any
    turn: Any


class Cut(NamedTuple):
    """How the output is cut into tiles: from the tile `whole` on they are halves, of TH / 2 rows."""

    tiles: Any
    whole: Any
    across: Any  # tiles of channels; upsampled, of left pixels and of right ones
    down: Any
    wide: Any
    channel_tiles: Any


class Place(NamedTuple):
    """The first element of a tile."""

    picture: Any
    row: Any
    column: Any
    n: Any  # channel
    below: Any  # upsampled: whether of the odd rows
    right: Any  # upsampled: whether of the odd columns
    half: Any  # whether the tile is half a tile


@gluon.jit
def share(dtype: gl.constexpr, TH: gl.constexpr, WS: gl.constexpr):
    """The `Shared` memory of a program, its barriers set up; the first turn is the first warpgroup's."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x = gl.allocate_shared_memory(dtype, [3 * (TH + 2), 16, 64], ROW)
    w = gl.allocate_shared_memory(dtype, [WS, 64, 64], ROW)
    y = gl.allocate_shared_memory(dtype, [2, TH * 16, 64], ROW)
    x_full = gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER)
    x_free = gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER)
    w_full = gl.allocate_shared_memory(gl.int64, [WS, 1], BARRIER)
    w_free = gl.allocate_shared_memory(gl.int64, [WS, 1], BARRIER)
    residual_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(3):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_free.index(i), count=1)
    for i in gl.static_range(WS):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(residual_full.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    return Shared(x, w, y, x_full, x_free, w_full, w_free, residual_full, turn)


@gluon.jit
def turns_of(cut, UP: gl.constexpr):
    """Tiles of this program, which its warpgroups take in turn; upsampled, each is two."""
    tiles = (cut.tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    return tiles * 2 if UP else tiles


@gluon.jit
def locate(turn, cut, TH: gl.constexpr, UP: gl.constexpr):
    """The `Place` of this program's tile of that turn."""
    below = turn % 2 if UP else 0
    tile = gl.program_id(0) + (turn // 2 if UP else turn) * gl.num_programs(0)
    rest = gl.maximum(tile - cut.whole, 0)
    unit = gl.minimum(tile, cut.whole) + rest // 2
    pixels, channels = unit // cut.across, unit % cut.across
    row = pixels // cut.wide % cut.down * TH + rest % 2 * (TH // 2)
    picture, column = pixels // (cut.down * cut.wide), pixels % cut.wide * 16
    n, right = channels % cut.channel_tiles * 64, channels // cut.channel_tiles
    return Place(picture, row, column, n, below, right, tile >= cut.whole)


@gluon.jit
def _tap(place, i, j, pad_top, pad_left, MODE: gl.constexpr):
    """Where the tap (i, j) of a tile's first pixel is: its row and parity, its column and parity."""
    if MODE == "up":
        return place.row + ((place.below + i - 1) >> 1), 0, place.column + ((place.right + j - 1) >> 1), 0
    h, w = i - pad_top, j - pad_left
    if MODE == "down":
        return place.row + (h >> 1), h & 1, place.column + (w >> 1), w & 1
    else:
        return place.row + h, 0, place.column + w, 0


@gluon.jit
def _load_rows(
    x, memory, full, picture, row, below, column, right, c, channels, FIRST: gl.constexpr, ROWS: gl.constexpr
):
    """ROWS rows of pixels and 64 channels from c on, into shared memory from its row FIRST on."""
    into = reinterpret(pieces(memory, FIRST, ROWS), x.dtype, x.block_shape, x.layout)
    if len(x.block_shape) == 5:  # (N, H / 2, 2, W / 2, 2 C)
        async_load(x, [picture, row, below, column, right * channels + c], full, into)
    else:
        async_load(x, [picture, row, column, c], full, into)


@gluon.jit
def _load_pixels(
    source, memory, full, picture, row, below, column, right, c,
    FIRST: gl.constexpr, ROWS: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """`_load_rows` of ROWS + EDGE rows: two loads, as the rows of one are a power of two."""
    mbarrier.expect(full, (ROWS + EDGE) * 16 * 128)
    block = source.whole if source.whole.block_shape[1] == ROWS else source.half
    channels = source.channels
    _load_rows(block, memory, full, picture, row, below, column, right, c, channels, FIRST, ROWS)
    if EDGE > 0:
        edge, next_row = source.edge, row + ROWS
        _load_rows(edge, memory, full, picture, next_row, below, column, right, c, channels, FIRST + ROWS, EDGE)


@gluon.jit
def _load_units(
    source, w, shared, place, pad_top, pad_left, units, products,
    TAPS: gl.constexpr, FIRST_TAP: gl.constexpr, TH: gl.constexpr, WS: gl.constexpr, HALVES: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    """All units of a source, each load as soon as its buffer is free; returns how many units and products there were.

    TAPS: products of a load; 0: one, without a filter, of the next 64 channels. FIRST_TAP: the row of its first tap.
    """
    POINT: gl.constexpr = TAPS == 0
    EDGE: gl.constexpr = 2 if TAPS > 1 else 0
    STEP: gl.constexpr = 2 if TAPS == 2 else 1  # rows of the filter from one product's tap to the next one's
    WIDTH: gl.constexpr = 192 if TAPS == 0 else 64
    HALF: gl.constexpr = TH // 2
    for block in range((source.channels + WIDTH - 1) // WIDTH):
        for j in gl.static_range(3):
            if POINT:
                c = block * WIDTH + j * 64
                row, below, column, right = place.row, 0, place.column, 0
            else:
                c = block * WIDTH
                row, below, column, right = _tap(place, FIRST_TAP, j, pad_top, pad_left, MODE)
            full = shared.x_full.index(j)
            mbarrier.wait(shared.x_free.index(j), (units & 1) ^ 1)
            n, x = place.picture, shared.x
            if HALVES:
                if place.half:
                    _load_pixels(source, x, full, n, row, below, column, right, c, j * (TH + 2), HALF, EDGE)
                else:
                    _load_pixels(source, x, full, n, row, below, column, right, c, j * (TH + 2), TH, EDGE)
            else:
                _load_pixels(source, x, full, n, row, below, column, right, c, j * (TH + 2), TH, EDGE)
            for r in gl.static_range(1 if POINT else TAPS):
                slot = products % WS
                mbarrier.wait(shared.w_free.index(slot), (products // WS & 1) ^ 1)
                mbarrier.expect(shared.w_full.index(slot), 64 * 128)
                into = reinterpret(shared.w.index(slot), w.dtype, w.block_shape, w.layout)
                tap = 0 if POINT else (FIRST_TAP + r * STEP) * 3 + j
                async_load(w, [place.n, tap, source.offset + c], shared.w_full.index(slot), into)
                products += 1
        units += 1
    return units, products


@gluon.jit
def produce(
    x, x2, w, shortcut, shortcut2, shortcut_w, shared, cut, pad_top, pad_left,
    TH: gl.constexpr, WS: gl.constexpr, HALVES: gl.constexpr, MODE: gl.constexpr, SHORTCUT: gl.constexpr,
):  # fmt: skip
    """One warp: the pixels and weights of one tile after another."""
    TAPS: gl.constexpr = 2 if MODE == "down" else 3
    units = 0
    products = 0
    for turn in range(turns_of(cut, MODE == "up")):
        place = locate(turn, cut, TH, MODE == "up")
        units, products = _load_units(
            x, w, shared, place, pad_top, pad_left, units, products, TAPS, 0, TH, WS, HALVES, MODE
        )  # fmt: skip
        if MODE == "down":
            units, products = _load_units(
                x, w, shared, place, pad_top, pad_left, units, products, 1, 1, TH, WS, HALVES, MODE
            )  # fmt: skip
        else:
            units, products = _load_units(
                x2, w, shared, place, pad_top, pad_left, units, products, TAPS, 0, TH, WS, HALVES, MODE
            )  # fmt: skip
        if SHORTCUT:
            units, products = _load_units(
                shortcut, shortcut_w, shared, place, 0, 0, units, products, 0, 0, TH, WS, HALVES, MODE
            )  # fmt: skip
            units, products = _load_units(
                shortcut2, shortcut_w, shared, place, 0, 0, units, products, 0, 0, TH, WS, HALVES, MODE
            )  # fmt: skip
