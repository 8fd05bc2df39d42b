"""The Gluon kernel of `linear`, `swiglu` and `geglu`: y = activation(x weight^T + bias) + residual, tile by tile.

A tile is 128 tokens x (B1 + B2) output channels, two products side by side: its width need be no power of two, so that
tiles can share out a card. One warp has the copy engine (TMA) load a step of BK input channels after another, as soon
as a buffer is free; two warpgroups multiply (wgmma):

- TURNS, where a program has several tiles: each makes its own, and while one multiplies, the other ends its tile.
- Else each makes half of the tokens of one tile, which is done sooner. In fp8 that is so however many tiles there are.

Where there are two products (DUAL), half of the columns of B1, and of B2, are of either; that of the second multiplies
the first.

In fp8 the sum of a step, which the matrix unit makes in some 14 bits, is added to a float32 sum in registers; while one
warpgroup adds, the other multiplies.

Every sum over the input channels has one order, whatever the tile: the tile changes no bit. What a warp computes from
the kernel's own arguments stays in its uniform registers, of which the copy engine and the matrix unit take their
addresses; what is computed before the warps part does not.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.hopper.language import (
    async_load,
    async_store,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fastdiff.kernels.device.language import cuda
from fastdiff.kernels.device.math import activate

SIZES = ("tokens", "channels", "down", "across")  # run-time numbers that are not worth a variant


class Shared(NamedTuple):
    """The shared memory of a program."""

    x: Any  # (STAGES, 128, BK), of the steps under way
    w: Any  # (STAGES, B1, BK)
    w2: Any  # (STAGES, B2, BK)
    y: Any  # (2, rows, columns that a warpgroup stores at a time)
    y2: Any  # (2, rows, B2)
    loaded: Any  # (STAGES, 1)
    read: Any  # (STAGES, 1)
    turn: Any  # (2, 1), of either warpgroup


class Inputs(NamedTuple):
    """Descriptors of the factors; w2 is w in blocks of B2 channels."""

    x: Any
    w: Any
    w2: Any


class Outputs(NamedTuple):
    """Where sums go, and what is done on the way; y2 is y in the blocks of the second product's channels."""

    y: Any
    y2: Any
    x_scale: Any  # of fp8: the factors of tokens, and of output channels
    scale: Any
    bias: Any
    residual: Any


class Sizes(NamedTuple):
    """Those of the operands, and of y in tiles."""

    tokens: Any
    channels: Any
    out_channels: Any
    down: Any
    across: Any


class Place(NamedTuple):
    """The first element of a tile of y."""

    row: Any
    column: Any


class Tile(NamedTuple):
    """The constants of a tile."""

    B1: Any
    B2: Any
    BK: Any  # 128 bytes
    STAGES: Any
    TURNS: Any
    DUAL: Any
    GROUP: Any  # rows of tiles that share the weights they find in the L2


@gluon.jit
def _share(dtype: gl.constexpr, inputs, out, tile: gl.constexpr):
    """The `Shared` memory of a program, its barriers set up; the first turn is the first warpgroup's."""
    ROWS: gl.constexpr = out.y.block_shape[0]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x = gl.allocate_shared_memory(dtype, [tile.STAGES, 128, tile.BK], inputs.x.layout)
    w = gl.allocate_shared_memory(dtype, [tile.STAGES, tile.B1, tile.BK], inputs.w.layout)
    y = gl.allocate_shared_memory(out.y.dtype, [2, ROWS, out.y.block_shape[1]], out.y.layout)
    w2, y2 = w, y
    if tile.B2 > 0:
        w2 = gl.allocate_shared_memory(dtype, [tile.STAGES, tile.B2, tile.BK], inputs.w2.layout)
        y2 = gl.allocate_shared_memory(out.y.dtype, [2, ROWS, out.y2.block_shape[1]], out.y2.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [tile.STAGES, 1], BARRIER)
    read = gl.allocate_shared_memory(gl.int64, [tile.STAGES, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(tile.STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(read.index(i), count=1 if tile.TURNS else 2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    return Shared(x, w, w2, y, y2, loaded, read, turn)


@gluon.jit
def _turns(sizes):
    """Tiles of this program."""
    return gl.cdiv(sizes.down * sizes.across - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _locate(turn, sizes, tile: gl.constexpr):
    """The `Place` of this program's tile of that turn: neighbours find their inputs in the L2."""
    COLUMNS: gl.constexpr = (tile.B1 + tile.B2) // 2 if tile.DUAL else tile.B1 + tile.B2
    i = gl.program_id(0) + turn * gl.num_programs(0)
    first = i // (tile.GROUP * sizes.across) * tile.GROUP
    height = gl.minimum(sizes.down - first, tile.GROUP)
    inner = i % (tile.GROUP * sizes.across)
    return Place((first + inner % height) * 128, inner // height * COLUMNS)


@gluon.jit
def _column2(column, tile: gl.constexpr):
    """Where the second product of a tile begins that begins at `column`."""
    FIRST: gl.constexpr = tile.B1 // 2 if tile.DUAL else tile.B1
    return column + FIRST


@gluon.jit
def _load_part(source, buffer, loaded, sizes, column, k, tile: gl.constexpr):
    """Load a step's weights of one of a tile's two products."""
    if tile.DUAL:
        EACH: gl.constexpr = source.block_shape[0]
        halves = reinterpret(buffer, source.dtype, [2, EACH, tile.BK], source.layout)
        async_load(source, [column, k], loaded, halves.index(0))
        async_load(source, [sizes.out_channels + column, k], loaded, halves.index(1))
    else:
        async_load(source, [column, k], loaded, buffer)


@gluon.jit
def _load_weights(inputs, shared, sizes, place, step, stage, tile: gl.constexpr):
    """Announce all that a step loads, and load its weights."""
    loaded, k = shared.loaded.index(stage), step * tile.BK
    mbarrier.expect(loaded, (128 + tile.B1 + tile.B2) * 128)
    _load_part(inputs.w, shared.w.index(stage), loaded, sizes, place.column, k, tile)
    if tile.B2 > 0:
        _load_part(inputs.w2, shared.w2.index(stage), loaded, sizes, _column2(place.column, tile), k, tile)


@gluon.jit
def _produce(inputs, shared, sizes, tile: gl.constexpr):
    """One warp: the steps of one tile after another, into the buffers as they become free.

    The first weights come before the kernel that makes x has ended: no kernel makes weights.
    """
    count = gl.cdiv(sizes.channels, tile.BK)
    early = gl.minimum(count, tile.STAGES)
    place = _locate(0, sizes, tile)
    for step in range(early):
        _load_weights(inputs, shared, sizes, place, step, step, tile)
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    at = 0
    for turn in range(_turns(sizes)):
        place = _locate(turn, sizes, tile)
        for step in range(count):
            stage = at % tile.STAGES
            if at >= early:
                mbarrier.wait(shared.read.index(stage), (at // tile.STAGES & 1) ^ 1)
                _load_weights(inputs, shared, sizes, place, step, stage, tile)
            async_load(inputs.x, [place.row, step * tile.BK], shared.loaded.index(stage), shared.x.index(stage))
            at += 1


@gluon.constexpr_function
def _layout(columns, step):
    """How the sums of so many columns lie in the registers of a warpgroup, which makes a step in four."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, step // 4])


@gluon.jit
def _sum(shared, turn, count, GROUP: gl.constexpr, ROWS: gl.constexpr, tile: gl.constexpr):
    """The sums over the input channels of a warpgroup's rows of the program's tile of that turn: float32, in two parts.

    When the products of a step have begun, those of the step before are done, and its buffers are free.
    """
    C2: gl.constexpr = tile.B2 if tile.B2 > 0 else 16
    acc = gl.zeros([ROWS, tile.B1], gl.float32, _layout(tile.B1, tile.BK))
    acc2 = gl.zeros([ROWS, C2], gl.float32, _layout(C2, tile.BK))
    first = turn * count
    if tile.TURNS:
        # this one looks at the buffers only when the other has passed its own: parity alone does not tell rounds apart
        mbarrier.wait(shared.turn.index(GROUP), turn // 2 & 1)
    for at in range(first, first + count):
        stage = at % tile.STAGES
        mbarrier.wait(shared.loaded.index(stage), at // tile.STAGES & 1)
        x = shared.x.index(stage)
        if not tile.TURNS:
            x = reinterpret(x, x.dtype, [2, ROWS, tile.BK], x.layout).index(GROUP)
        acc = warpgroup_mma(x, shared.w.index(stage).permute((1, 0)), acc, is_async=True)
        if tile.B2 > 0:
            acc2 = warpgroup_mma(x, shared.w2.index(stage).permute((1, 0)), acc2, is_async=True)
            acc, acc2 = warpgroup_mma_wait(2, deps=[acc, acc2])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(shared.read.index((at + tile.STAGES - 1) % tile.STAGES), count=1, pred=at > first)
    if tile.TURNS:
        mbarrier.arrive(shared.turn.index(1 - GROUP), count=1)
    if tile.B2 > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(shared.read.index((first + count - 1) % tile.STAGES), count=1)
    return acc, acc2


@gluon.jit
def _multiply(x, w, tile: gl.constexpr):
    """The product of a step, summed from zero."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = w.shape[0]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, _layout(COLUMNS, tile.BK))
    product = warpgroup_mma(x, w.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[product])


@gluon.jit
def _sum_fp8(shared, turn, count, GROUP: gl.constexpr, ROWS: gl.constexpr, tile: gl.constexpr):
    """What `_sum` returns, in fp8: each step is summed on its own, then added. Either warpgroup has its rows of all."""
    C2: gl.constexpr = tile.B2 if tile.B2 > 0 else 16
    acc = gl.zeros([ROWS, tile.B1], gl.float32, _layout(tile.B1, tile.BK))
    acc2 = gl.zeros([ROWS, C2], gl.float32, _layout(C2, tile.BK))
    for at in range(turn * count, turn * count + count):
        stage = at % tile.STAGES
        mbarrier.wait(shared.loaded.index(stage), at // tile.STAGES & 1)
        x = shared.x.index(stage)
        x = reinterpret(x, x.dtype, [2, ROWS, tile.BK], x.layout).index(GROUP)
        product = _multiply(x, shared.w.index(stage), tile)
        if tile.B2 > 0:
            acc += product  # before the next begins: there are no registers for two
            product2 = _multiply(x, shared.w2.index(stage), tile)
            mbarrier.arrive(shared.read.index(stage), count=1)
            acc2 += product2
        else:
            mbarrier.arrive(shared.read.index(stage), count=1)
            acc += product
    return acc, acc2


@gluon.jit
def _load_row(ptr, column, out_channels, COLUMNS: gl.constexpr, tile: gl.constexpr):
    """(1, COLUMNS), from `column` on; DUAL: half of them, and as many of the second product."""
    EACH: gl.constexpr = COLUMNS // 2 if tile.DUAL else COLUMNS
    i = gl.arange(0, COLUMNS, gl.SliceLayout(0, _layout(COLUMNS, tile.BK)))
    n = column + i % EACH
    return gl.expand_dims(gl.load(ptr + n + i // EACH * out_channels, mask=n < out_channels, other=0.0), 0)


@gluon.jit
def _load_bias(bias_ptr, column, out_channels, tile: gl.constexpr):
    """The bias of either part of a tile; 0 where there is none."""
    if bias_ptr is None:
        return 0, 0
    elif tile.B2 > 0:
        bias = _load_row(bias_ptr, column, out_channels, tile.B1, tile)
        return bias, _load_row(bias_ptr, _column2(column, tile), out_channels, tile.B2, tile)
    else:
        return _load_row(bias_ptr, column, out_channels, tile.B1, tile), 0


@gluon.jit
def _scale(acc, out, row, column, sizes, tile: gl.constexpr):
    """Sums of fp8 by the factors of their tokens, then by those of their channels."""
    if out.scale is not None:
        i = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        acc *= gl.expand_dims(gl.load(out.x_scale + i, mask=i < sizes.tokens, other=0.0), 1)
        acc *= _load_row(out.scale, column, sizes.out_channels, acc.shape[1], tile)
    return acc


@gluon.jit
def _add_residual(acc, residual_ptr, row, column, sizes):
    if residual_ptr is not None:
        r = gl.expand_dims(row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout)), 1)
        c = gl.expand_dims(column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout)), 0)
        offsets, inside = r.to(gl.int64) * sizes.out_channels + c, (r < sizes.tokens) & (c < sizes.out_channels)
        acc += gl.load(residual_ptr + offsets, mask=inside, other=0.0).to(gl.float32)
    return acc


@gluon.jit
def _halves(acc):
    """The left and the right columns of a tile."""
    HALF: gl.constexpr = acc.shape[1] // 2
    return acc.reshape([acc.shape[0], 2, HALF]).permute((0, 2, 1)).split()


@gluon.jit
def _store_parts(
    out, y, y_s, acc, row, column, sizes,
    ACTIVATION: gl.constexpr, ACTIVATION2: gl.constexpr, DUAL: gl.constexpr,
):  # fmt: skip
    """Do what comes after the bias, as many columns at a time as `y_s` has, and send them out by `y_s`."""
    if acc.shape[1] > y.block_shape[1] and not DUAL:
        COLUMNS: gl.constexpr = acc.shape[1] // 2
        left, right = _halves(acc)
        _store_parts(out, y, y_s, left, row, column, sizes, ACTIVATION, ACTIVATION2, DUAL)
        store_wait(0)
        _store_parts(out, y, y_s, right, row, column + COLUMNS, sizes, ACTIVATION, ACTIVATION2, DUAL)
    else:
        if DUAL:
            acc, factor = _halves(acc)
            acc = activate(acc, ACTIVATION) * activate(factor, ACTIVATION2)
        else:
            acc = activate(acc, ACTIVATION)
        acc = _add_residual(acc, out.residual, row, column, sizes)
        y_s.store(acc.to(y.dtype))
        fence_async_shared()
        async_store(y, [row, column], y_s)  # writes nothing outside


@gluon.jit
def _finish(
    out, y, y_s, acc, bias, row, column, sizes,
    ACTIVATION: gl.constexpr, ACTIVATION2: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """The end of a part of a warpgroup's tile."""
    acc = _scale(acc, out, row, column, sizes, tile)
    if out.bias is not None:
        acc += bias.to(gl.float32)
    _store_parts(out, y, y_s, acc, row, column, sizes, ACTIVATION, ACTIVATION2, tile.DUAL)


@gluon.jit
def _consume(
    out, shared, sizes, GROUP: gl.constexpr, ACTIVATION: gl.constexpr, ACTIVATION2: gl.constexpr, tile: gl.constexpr
):
    """A warpgroup: every second tile of the program, or half of each."""
    ROWS: gl.constexpr = out.y.block_shape[0]
    FIRST: gl.constexpr = GROUP if tile.TURNS else 0
    STRIDE: gl.constexpr = 2 if tile.TURNS else 1
    FP8: gl.constexpr = out.scale is not None
    EARLY: gl.constexpr = not tile.TURNS and not FP8  # else nobody waits for the bias, or the sums need all registers
    count = gl.cdiv(sizes.channels, tile.BK)
    for turn in range(FIRST, _turns(sizes), STRIDE):
        place = _locate(turn, sizes, tile)
        row = place.row if tile.TURNS else place.row + GROUP * ROWS
        column = place.column
        if EARLY:
            bias, bias2 = _load_bias(out.bias, column, sizes.out_channels, tile)
        if FP8:
            acc, acc2 = _sum_fp8(shared, turn, count, GROUP, ROWS, tile)
        else:
            acc, acc2 = _sum(shared, turn, count, GROUP, ROWS, tile)
        if not EARLY:
            bias, bias2 = _load_bias(out.bias, column, sizes.out_channels, tile)
        store_wait(0)  # the tile before has left the buffers
        y_s, y2_s = shared.y.index(GROUP), shared.y2.index(GROUP)
        _finish(out, out.y, y_s, acc, bias, row, column, sizes, ACTIVATION, ACTIVATION2, tile)
        if tile.B2 > 0:
            column2 = _column2(column, tile)
            _finish(out, out.y2, y2_s, acc2, bias2, row, column2, sizes, ACTIVATION, ACTIVATION2, tile)
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_linear_kernel(
    y, y2, x, w, w2, x_scale, scale, bias, residual, tokens, channels, out_channels, down, across,
    ACTIVATION: gl.constexpr, ACTIVATION2: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, DUAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """y (tokens, out_channels) of x (tokens, channels) and w (out_channels or, DUAL, twice as many, channels).

    These are descriptors; where B2 is 0 nothing is read of y2 and w2. ACTIVATION2 is of the second of DUAL.
    x_scale, scale: of fp8, factors of tokens and of w's rows.
    down, across: tiles of y. A program makes each so many-th.
    """
    tile: gl.constexpr = Tile(B1, B2, BK, STAGES, TURNS, DUAL, GROUP)
    inputs, out = Inputs(x, w, w2), Outputs(y, y2, x_scale, scale, bias, residual)
    sizes = Sizes(tokens, channels, out_channels, down, across)
    shared = _share(x.dtype, inputs, out, tile)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # constants by their names: a literal would lose that it is one. At the end are the warps and the registers of all
    # but the first; that has the four warps of the launch, and the registers that are left
    gl.warp_specialize([
        (_consume, (out, shared, sizes, FIRST, ACTIVATION, ACTIVATION2, tile)),
        (_consume, (out, shared, sizes, SECOND, ACTIVATION, ACTIVATION2, tile)),
        (_produce, (inputs, shared, sizes, tile)),
    ], [4, 1], [240, 24])  # fmt: skip
