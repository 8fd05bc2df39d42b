"""The producer side of `hopper.attention`: a program's tiles of queries, its shared memory, and the warp that loads."""

from typing import Any, NamedTuple

from fastdiff.kernels.device.hopper.language import async_load, gl, gluon, mbarrier


class Shape(NamedTuple):
    """The constants of a kernel."""

    WGS: Any  # warpgroups, each with 64 queries of a tile
    D1: Any  # columns of the first part of a head's width, a power of two
    D2: Any  # columns of the second part; 0 if there is only one
    BN: Any  # keys per block
    STAGES: Any  # blocks of keys, and of values, in shared memory
    TILES: Any  # tiles of queries in shared memory: 2 if programs are persistent
    EVEN: Any  # whether the last block of keys is full
    IN_TURN: Any  # whether the warpgroups issue their products in turn
    CAUSAL: Any


class Parts(NamedTuple):
    """The two parts of a head's width, as descriptors or shared memory. If there is only one, `second` is `first`."""

    first: Any
    second: Any


class Buffers(NamedTuple):
    """A ring of pieces of shared memory, and their barriers."""

    parts: Parts  # (pieces, 1, 1, rows, columns)
    loaded: Any  # (pieces, 1)
    read: Any  # (pieces, 1); for queries (TILES, 1)


class Streams(NamedTuple):
    """The shared memory of queries, keys and values."""

    q: Buffers  # TILES * WGS pieces
    k: Buffers  # STAGES pieces
    v: Buffers


class Work(NamedTuple):
    """The work of all programs: each (picture, head) pair has full_tiles + small_tiles tiles of queries."""

    pairs: Any
    heads: Any
    full_tiles: Any  # with WGS warpgroups
    small_tiles: Any  # with one warpgroup less
    keys: Any
    last: Any  # index of the last block of keys
    scale: Any
    bias_ptr: Any  # (pictures, keys), or None
    lengths_ptr: Any  # (pictures,): how many keys a picture attends to; None for all


class Tile(NamedTuple):
    """A tile of queries of a program."""

    number: Any  # its index over all programs
    last: Any  # the last block of keys that its queries see, which is visited first
    turn: Any  # number of earlier tiles of this program
    done: Any  # number of their blocks of keys
    keys: Any  # how many keys its queries attend to


class Place(NamedTuple):
    """The first query of a tile."""

    picture: Any
    head: Any
    row: Any


@gluon.jit
def tiles_of(work):
    """Return the number of tiles of all programs."""
    return work.pairs * (work.full_tiles + work.small_tiles)


@gluon.jit
def place_of(number, work, shape: gl.constexpr):
    """Return the place of a tile. All full tiles come first, pair by pair, then the small ones."""
    pair = number // gl.maximum(work.full_tiles, 1)
    row = number % gl.maximum(work.full_tiles, 1) * (shape.WGS * 64)
    if number >= work.full_tiles * work.pairs:
        rest = number - work.full_tiles * work.pairs
        pair = rest // gl.maximum(work.small_tiles, 1)
        row = work.full_tiles * (shape.WGS * 64)
        row += rest % gl.maximum(work.small_tiles, 1) * (shape.WGS * 64 - 64)
    return Place(pair // work.heads, pair % work.heads, row)


@gluon.jit
def tile_of(number, turn, done, work, shape: gl.constexpr):
    """Return a tile by its number, in a program that has done `turn` tiles with `done` blocks of keys."""
    last = work.last
    keys = work.keys
    if work.lengths_ptr is not None:
        keys = gl.minimum(keys, gl.load(work.lengths_ptr + place_of(number, work, shape).picture))
        last = gl.cdiv(keys, shape.BN) - 1
    if shape.CAUSAL:  # up to the last query's own key
        row = place_of(number, work, shape).row
        last = gl.minimum(last, (row + shape.WGS * 64 - 1) // shape.BN)
    elif work.lengths_ptr is None:  # the same value, without a register that lives across tiles
        done = turn * (last + 1)
    return Tile(number, last, turn, done, keys)


@gluon.jit
def buffers(tensor, PIECES: gl.constexpr, ROWS: gl.constexpr, READS: gl.constexpr, shape: gl.constexpr):
    """Allocate shared memory for PIECES pieces of (ROWS, D1 + D2), with PIECES `loaded` and READS `read` barriers."""
    dtype: gl.constexpr = tensor.first.dtype
    first = gl.allocate_shared_memory(dtype, [PIECES, 1, 1, ROWS, shape.D1], tensor.first.layout)
    parts = Parts(first, first)
    if shape.D2 > 0:
        second = gl.allocate_shared_memory(dtype, [PIECES, 1, 1, ROWS, shape.D2], tensor.second.layout)
        parts = Parts(first, second)
    loaded = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [READS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PIECES):
        mbarrier.init(loaded.index(i), count=1)
    for i in gl.static_range(READS):
        mbarrier.init(read.index(i), count=shape.WGS)
    return Buffers(parts, loaded, read)


@gluon.jit
def _load(tensor, buffers, piece, place, row, ROWS: gl.constexpr, shape: gl.constexpr):
    """Start to load rows of a head into a piece of the buffers."""
    loaded = buffers.loaded.index(piece)
    mbarrier.expect(loaded, ROWS * (shape.D1 + shape.D2) * 2)
    async_load(tensor.first, [place.picture, place.head, row, 0], loaded, buffers.parts.first.index(piece))
    if shape.D2 > 0:
        async_load(tensor.second, [place.picture, place.head, row, shape.D1], loaded, buffers.parts.second.index(piece))


@gluon.jit
def _load_block(tensor, buffers, count, place, row, shape: gl.constexpr):
    """Start to load the count-th block of keys or values of this program as soon as a buffer is free."""
    stage = count % shape.STAGES
    mbarrier.wait(buffers.read.index(stage), (count // shape.STAGES & 1) ^ 1)
    _load(tensor, buffers, stage, place, row, shape.BN, shape)


@gluon.jit
def produce(q, k, v, inputs, work, shape: gl.constexpr):
    """Producer warp: load queries, and blocks of keys and values from the last to the first."""
    turn = 0
    done = 0
    for number in range(gl.program_id(0), tiles_of(work), gl.num_programs(0)):
        tile = tile_of(number, turn, done, work, shape)
        place = place_of(number, work, shape)
        buffer = turn % shape.TILES
        mbarrier.wait(inputs.q.read.index(buffer), (turn // shape.TILES & 1) ^ 1)
        _load(q, inputs.q, buffer * shape.WGS, place, place.row, 64, shape)
        for i in range(tile.last + 2):
            if i <= tile.last:
                _load_block(k, inputs.k, tile.done + i, place, (tile.last - i) * shape.BN, shape)
            if i == 0:
                for group in gl.static_range(1, shape.WGS):
                    piece = buffer * shape.WGS + group
                    _load(q, inputs.q, piece, place, place.row + group * 64, 64, shape)
            else:  # values one step later, when they are needed
                _load_block(v, inputs.v, tile.done + i - 1, place, (tile.last + 1 - i) * shape.BN, shape)
        turn += 1  # noqa: SIM113 (Triton has no enumerate)
        done += tile.last + 1
