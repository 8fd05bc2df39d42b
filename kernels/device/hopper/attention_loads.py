"""The loads of `hopper.attention`: which tiles of queries a program has, its shared memory, the warp that fills it."""

from typing import Any, NamedTuple

from fastdiff.kernels.device.hopper.language import async_load, gl, gluon, mbarrier


class Shape(NamedTuple):
    """The constants of a kernel."""

    WGS: Any  # warpgroups, each with 64 queries of a tile
    D1: Any  # columns of the first part of a head's width, a power of two
    D2: Any  # of the second; 0 where there is one part alone
    BN: Any  # keys of a block
    STAGES: Any  # blocks of keys, and of values, in shared memory
    TILES: Any  # tiles of queries in shared memory: 2 where programs are persistent
    EVEN: Any  # whether the last block of keys is whole
    IN_TURN: Any  # whether the warpgroups issue their products in turn
    CAUSAL: Any


class Parts(NamedTuple):
    """The two parts of a head's width: descriptors or shared memory. Where there is one alone, `second` is `first`."""

    first: Any
    second: Any


class Buffers(NamedTuple):
    """Shared memory that is filled and read in turn, a piece an index, and the barriers of its pieces."""

    parts: Parts  # (pieces, 1, 1, rows, columns)
    loaded: Any  # (pieces, 1)
    read: Any  # (pieces, 1); for queries (TILES, 1)


class Streams(NamedTuple):
    """Queries, keys and values on their way through shared memory."""

    q: Buffers  # TILES * WGS pieces
    k: Buffers  # STAGES pieces
    v: Buffers


class Work(NamedTuple):
    """All that is to be done: so many tiles of queries of each pair of a picture and a head."""

    pairs: Any
    heads: Any
    full_tiles: Any  # of WGS warpgroups
    small_tiles: Any  # of one less
    keys: Any
    last: Any  # block of keys
    scale: Any
    bias_ptr: Any  # (pictures, keys), or None


class Tile(NamedTuple):
    """A tile of queries, among those of a program."""

    number: Any  # among those of all programs
    last: Any  # block of keys that its queries see, and the first to come
    turn: Any  # tiles of this program before it
    done: Any  # their blocks of keys


class Place(NamedTuple):
    """The first query of a tile."""

    picture: Any
    head: Any
    row: Any


@gluon.jit
def tiles_of(work):
    """All tiles of all programs."""
    return work.pairs * (work.full_tiles + work.small_tiles)


@gluon.jit
def place_of(number, work, shape: gl.constexpr):
    """The place of a tile. All full tiles come first, a pair's side by side, then the small ones."""
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
    """A tile by its number, of a program that did `turn` tiles with `done` blocks of keys before."""
    last = work.last
    if shape.CAUSAL:  # up to the last query's own key
        row = place_of(number, work, shape).row
        last = gl.minimum(last, (row + shape.WGS * 64 - 1) // shape.BN)
    else:  # the same number, which takes no register from one tile to the next
        done = turn * (last + 1)
    return Tile(number, last, turn, done)


@gluon.jit
def buffers(tensor, PIECES: gl.constexpr, ROWS: gl.constexpr, READS: gl.constexpr, shape: gl.constexpr):
    """Shared memory for pieces of (ROWS, D1 + D2), with their barriers, of which READS are for readers."""
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
    """Begin to load rows of a head into a piece of the buffers."""
    loaded = buffers.loaded.index(piece)
    mbarrier.expect(loaded, ROWS * (shape.D1 + shape.D2) * 2)
    async_load(tensor.first, [place.picture, place.head, row, 0], loaded, buffers.parts.first.index(piece))
    if shape.D2 > 0:
        async_load(tensor.second, [place.picture, place.head, row, shape.D1], loaded, buffers.parts.second.index(piece))


@gluon.jit
def _load_block(tensor, buffers, count, place, row, shape: gl.constexpr):
    """Begin to load a block of keys or values, the count-th of this program, when a buffer is free."""
    stage = count % shape.STAGES
    mbarrier.wait(buffers.read.index(stage), (count // shape.STAGES & 1) ^ 1)
    _load(tensor, buffers, stage, place, row, shape.BN, shape)


@gluon.jit
def produce(q, k, v, inputs, work, shape: gl.constexpr):
    """One warp: queries, and blocks of keys and values from the last to the first."""
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
            else:  # values one step later, as they are wanted
                _load_block(v, inputs.v, tile.done + i - 1, place, (tile.last + 1 - i) * shape.BN, shape)
        turn += 1  # noqa: SIM113 (Triton has no enumerate)
        done += tile.last + 1
