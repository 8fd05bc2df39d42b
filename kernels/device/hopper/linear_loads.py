"""The producer side of the Gluon kernel of `linear`, `swiglu` and `geglu`: shared memory, tiles, and their loads."""

from typing import Any, NamedTuple

from fastdiff.kernels.device.hopper.language import (
    async_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)
from fastdiff.kernels.device.language import cuda


class Shared(NamedTuple):
    """The shared memory of a program."""

    x: Any  # (RINGS STAGES, 128, BK), the steps in flight
    w: Any  # (RINGS STAGES, B1, BK)
    w2: Any  # (RINGS STAGES, B2, BK)
    y: Any  # (2, rows, columns that a warpgroup stores at a time)
    y2: Any  # (2, rows, columns of the second product)
    loaded: Any  # (RINGS STAGES, 1)
    read: Any  # (RINGS STAGES, 1)
    turn: Any  # (2, 1), a barrier for each warpgroup


class Operands(NamedTuple):
    """Descriptors of the operands; w2 is w with blocks of B2 channels."""

    x: Any
    w: Any
    w2: Any


class Outputs(NamedTuple):
    """The output and the operands of the epilogue; y2 is y with blocks of the second product's channels."""

    y: Any
    y2: Any
    x_scale: Any  # the scale of each fp8 token
    scale: Any  # the scale of each output channel of an 8-bit weight
    bias: Any
    residual: Any


class Sizes(NamedTuple):
    """The sizes of the operands, and of y in tiles."""

    tokens: Any
    channels: Any
    out_channels: Any
    down: Any
    across: Any


class Place(NamedTuple):
    """The first element of a tile of y."""

    row: Any
    column: Any


class TileShape(NamedTuple):
    """The constants of a tile."""

    B1: Any
    B2: Any
    BK: Any  # 128 bytes
    STAGES: Any
    TURNS: Any
    DUAL: Any
    RINGS: Any  # rings of STAGES buffers: 2 if each warpgroup has its own
    GROUP_M: Any  # rows of tiles that share weights in the L2


@gluon.jit
def share(dtype: gl.constexpr, inputs, out, tile: gl.constexpr):
    """Allocate the `Shared` memory of a program and initialise its barriers; the first warpgroup has the first turn."""
    ROWS: gl.constexpr = out.y.block_shape[0]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BUFFERS: gl.constexpr = tile.RINGS * tile.STAGES
    x = gl.allocate_shared_memory(dtype, [BUFFERS, 128, tile.BK], inputs.x.layout)
    w = gl.allocate_shared_memory(dtype, [BUFFERS, tile.B1, tile.BK], inputs.w.layout)
    y = gl.allocate_shared_memory(out.y.dtype, [2, ROWS, out.y.block_shape[1]], out.y.layout)
    w2, y2 = w, y
    if tile.B2 > 0:
        w2 = gl.allocate_shared_memory(dtype, [BUFFERS, tile.B2, tile.BK], inputs.w2.layout)
        y2 = gl.allocate_shared_memory(out.y.dtype, [2, ROWS, out.y2.block_shape[1]], out.y2.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    read = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(read.index(i), count=1 if tile.TURNS else 2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    return Shared(x, w, w2, y, y2, loaded, read, turn)


@gluon.jit
def turns(sizes):
    """Return the number of tiles of this program."""
    return gl.cdiv(sizes.down * sizes.across - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def locate(turn, sizes, tile: gl.constexpr):
    """Return the `Place` of this program's tile in a turn; neighbouring tiles share inputs in the L2."""
    COLUMNS: gl.constexpr = (tile.B1 + tile.B2) // 2 if tile.DUAL else tile.B1 + tile.B2
    i = gl.program_id(0) + turn * gl.num_programs(0)
    first = i // (tile.GROUP_M * sizes.across) * tile.GROUP_M
    height = gl.minimum(sizes.down - first, tile.GROUP_M)
    inner = i % (tile.GROUP_M * sizes.across)
    return Place((first + inner % height) * 128, inner // height * COLUMNS)


@gluon.jit
def column2_of(column, tile: gl.constexpr):
    """Return the first column of the second product, for a tile that starts at `column`."""
    FIRST: gl.constexpr = tile.B1 // 2 if tile.DUAL else tile.B1
    return column + FIRST


@gluon.jit
def _load_part(source, buffer, loaded, sizes, column, k, tile: gl.constexpr):
    """Load a step's weights for one of a tile's two products."""
    if tile.DUAL:
        EACH: gl.constexpr = source.block_shape[0]
        halves = reinterpret(buffer, source.dtype, [2, EACH, tile.BK], source.layout)
        async_load(source, [column, k], loaded, halves.index(0))
        async_load(source, [sizes.out_channels + column, k], loaded, halves.index(1))
    else:
        async_load(source, [column, k], loaded, buffer)


@gluon.jit
def _load_weights(inputs, shared, sizes, place, step, stage, tile: gl.constexpr):
    """Set the byte count that a step's barrier expects, and load its weights."""
    loaded, k = shared.loaded.index(stage), step * tile.BK
    mbarrier.expect(loaded, (128 + tile.B1 + tile.B2) * 128)
    _load_part(inputs.w, shared.w.index(stage), loaded, sizes, place.column, k, tile)
    if tile.B2 > 0:
        _load_part(inputs.w2, shared.w2.index(stage), loaded, sizes, column2_of(place.column, tile), k, tile)


@gluon.jit
def produce(inputs, shared, sizes, RING: gl.constexpr, EARLY: gl.constexpr, tile: gl.constexpr):
    """Producer warp: load the steps of its tiles into a ring's buffers as they become free.

    EARLY: load the first weights before the kernel that computes x has ended. This is safe because no kernel writes
    weights, except those converted from int8 by the previous kernel.
    """
    RINGS: gl.constexpr = tile.RINGS
    count = gl.cdiv(sizes.channels, tile.BK)
    early = gl.minimum(count, tile.STAGES) if EARLY else 0
    place = locate(RING, sizes, tile)
    for step in range(early):
        _load_weights(inputs, shared, sizes, place, step, RING * tile.STAGES + step, tile)
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    at = 0
    for turn in range(RING, turns(sizes), RINGS):
        place = locate(turn, sizes, tile)
        for step in range(count):
            stage = RING * tile.STAGES + at % tile.STAGES
            if at >= early:
                mbarrier.wait(shared.read.index(stage), (at // tile.STAGES & 1) ^ 1)
                _load_weights(inputs, shared, sizes, place, step, stage, tile)
            async_load(inputs.x, [place.row, step * tile.BK], shared.loaded.index(stage), shared.x.index(stage))
            at += 1
