"""The Gluon kernel of `linear`, `swiglu` and `geglu`: y = activation(x weight^T + bias) + residual, tile by tile.

A tile is 128 tokens x (B1 + B2) output channels, computed as two products side by side. Its width need not be a power
of two, so tiles can be sized to fill the GPU. A producer warp loads steps of BK input channels with TMA as buffers
become free; two consumer warpgroups multiply (wgmma):

- With TURNS, for programs with several tiles, each warpgroup computes its own tiles (ping-pong): while one multiplies,
  the other runs its epilogue.
- Otherwise each warpgroup computes half of the tokens of one tile, which finishes sooner.

With two products (DUAL), half of the columns of B1, and half of B2, belong to each; the second product multiplies the
first.

In fp8, tensor cores sum a step in about 14 bits, and the result is added to a float32 sum in registers; while one
warpgroup adds, the other multiplies. So both may multiply at any time, even if each computes its own tiles. In that
case each has its own ring of buffers and its own producer warp, and only their starts are staggered, so that they
finish tiles alternately.

Every sum over input channels has the same order in every tile, so tiles do not change a bit. Values that a warp
computes from the kernel arguments stay in its uniform registers, which TMA and wgmma use for addresses; values computed
before warp specialisation do not.
"""

from fastdiff.kernels.device.hopper.language import (
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
from fastdiff.kernels.device.hopper.linear_loads import (
    Operands,
    Outputs,
    Sizes,
    TileShape,
    column2_of,
    locate,
    produce,
    share,
    turns,
)
from fastdiff.kernels.device.math import activate

SIZES = ("tokens", "channels", "down", "across")  # run-time arguments not worth a kernel variant


@gluon.constexpr_function
def _layout(columns, step):
    """Return the register layout of a warpgroup's sums with `columns` columns; a step takes four instructions."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, step // 4])


@gluon.jit
def _sum(shared, turn, count, WG: gl.constexpr, ROWS: gl.constexpr, tile: gl.constexpr):
    """Return the float32 sums over input channels, in two parts, of a warpgroup's rows of the tile in a turn.

    Once the products of a step are issued, those of the previous step are done, and its buffers are released.
    """
    C2: gl.constexpr = tile.B2 if tile.B2 > 0 else 16
    acc = gl.zeros([ROWS, tile.B1], gl.float32, _layout(tile.B1, tile.BK))
    acc2 = gl.zeros([ROWS, C2], gl.float32, _layout(C2, tile.BK))
    first = turn * count
    if tile.TURNS:
        # wait until the other warpgroup has passed its buffers, because parity alone does not tell rounds apart
        mbarrier.wait(shared.turn.index(WG), turn // 2 & 1)
    for at in range(first, first + count):
        stage = at % tile.STAGES
        mbarrier.wait(shared.loaded.index(stage), at // tile.STAGES & 1)
        x = shared.x.index(stage)
        if not tile.TURNS:
            x = reinterpret(x, x.dtype, [2, ROWS, tile.BK], x.layout).index(WG)
        acc = warpgroup_mma(x, shared.w.index(stage).permute((1, 0)), acc, is_async=True)
        if tile.B2 > 0:
            acc2 = warpgroup_mma(x, shared.w2.index(stage).permute((1, 0)), acc2, is_async=True)
            acc, acc2 = warpgroup_mma_wait(2, deps=[acc, acc2])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(shared.read.index((at + tile.STAGES - 1) % tile.STAGES), count=1, pred=at > first)
    if tile.TURNS:
        mbarrier.arrive(shared.turn.index(1 - WG), count=1)
    if tile.B2 > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(shared.read.index((first + count - 1) % tile.STAGES), count=1)
    return acc, acc2


@gluon.jit
def _multiply(x, w, tile: gl.constexpr):
    """Return the product of a step, accumulated from zero."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = w.shape[0]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, _layout(COLUMNS, tile.BK))
    product = warpgroup_mma(x, w.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[product])


@gluon.jit
def _sum_fp8(shared, turn, count, WG: gl.constexpr, ROWS: gl.constexpr, tile: gl.constexpr):
    """Compute the sums of `_sum` in fp8: each step is summed separately, then added.

    The two parts are halves of the rows if the warpgroup has its own tile; otherwise both parts of the columns, for its
    own rows.
    """
    OWN: gl.constexpr = tile.RINGS == 2
    C2: gl.constexpr = tile.B1 if OWN else tile.B2 if tile.B2 > 0 else 16
    RING: gl.constexpr = WG * tile.STAGES if OWN else 0
    acc = gl.zeros([ROWS, tile.B1], gl.float32, _layout(tile.B1, tile.BK))
    acc2 = gl.zeros([ROWS, C2], gl.float32, _layout(C2, tile.BK))
    if OWN and WG == 1:
        mbarrier.wait(shared.turn.index(1), 0)  # once, for the other warpgroup's first tile
    first = turn // tile.RINGS * count
    for at in range(first, first + count):
        stage = RING + at % tile.STAGES
        mbarrier.wait(shared.loaded.index(stage), at // tile.STAGES & 1)
        x, w = shared.x.index(stage), shared.w.index(stage)
        x = reinterpret(x, x.dtype, [2, ROWS, tile.BK], x.layout)
        product = _multiply(x.index(0 if OWN else WG), w, tile)
        if OWN or tile.B2 > 0:
            acc += product  # before the next product starts: there are no registers for two
            w2 = w if OWN else shared.w2.index(stage)
            product2 = _multiply(x.index(1 if OWN else WG), w2, tile)
            mbarrier.arrive(shared.read.index(stage), count=1)
            acc2 += product2
        else:
            mbarrier.arrive(shared.read.index(stage), count=1)
            acc += product
    if OWN and WG == 0:
        mbarrier.arrive(shared.turn.index(1), count=1, pred=turn == 0)
    return acc, acc2


@gluon.jit
def _load_row(ptr, column, out_channels, COLUMNS: gl.constexpr, tile: gl.constexpr):
    """Load a row (1, COLUMNS) from `column` on. DUAL: half of it is for the first product, half for the second."""
    EACH: gl.constexpr = COLUMNS // 2 if tile.DUAL else COLUMNS
    i = gl.arange(0, COLUMNS, gl.SliceLayout(0, _layout(COLUMNS, tile.BK)))
    n = column + i % EACH
    return gl.expand_dims(gl.load(ptr + n + i // EACH * out_channels, mask=n < out_channels, other=0.0), 0)


@gluon.jit
def _load_bias(bias_ptr, column, out_channels, tile: gl.constexpr):
    """Load the bias of both parts of a tile; 0 if absent."""
    if bias_ptr is None:
        return 0, 0
    elif tile.B2 > 0:
        bias = _load_row(bias_ptr, column, out_channels, tile.B1, tile)
        return bias, _load_row(bias_ptr, column2_of(column, tile), out_channels, tile.B2, tile)
    else:
        return _load_row(bias_ptr, column, out_channels, tile.B1, tile), 0


@gluon.jit
def _scale(acc, out, row, column, sizes, tile: gl.constexpr):
    """Multiply sums by the scales of their channels and, if tokens are fp8, of their tokens."""
    if out.x_scale is not None:
        i = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        acc *= gl.expand_dims(gl.load(out.x_scale + i, mask=i < sizes.tokens, other=0.0), 1)
    return acc * _load_row(out.scale, column, sizes.out_channels, acc.shape[1], tile)


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
    """Return the left and the right half of the columns of a tile."""
    HALF: gl.constexpr = acc.shape[1] // 2
    return acc.reshape([acc.shape[0], 2, HALF]).permute((0, 2, 1)).split()


@gluon.jit
def _store_parts(
    out, y, y_s, acc, row, column, sizes,
    ACTIVATION: gl.constexpr, ACTIVATION2: gl.constexpr, DUAL: gl.constexpr,
):  # fmt: skip
    """Run the epilogue after the bias and store through `y_s`, as many columns at a time as it holds."""
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
        async_store(y, [row, column], y_s)  # TMA drops what is outside


@gluon.jit
def _finish(
    out, y, y_s, acc, bias, row, column, sizes,
    ACTIVATION: gl.constexpr, ACTIVATION2: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """Run the epilogue of one part of a warpgroup's tile."""
    if out.scale is not None:
        acc = _scale(acc, out, row, column, sizes, tile)
    if out.bias is not None:
        if out.x_scale is not None:
            bias = _load_row(out.bias, column, sizes.out_channels, acc.shape[1], tile)
        acc += bias.to(gl.float32)
    _store_parts(out, y, y_s, acc, row, column, sizes, ACTIVATION, ACTIVATION2, tile.DUAL)


@gluon.jit
def _consume(
    out, shared, sizes, WG: gl.constexpr, ACTIVATION: gl.constexpr, ACTIVATION2: gl.constexpr, tile: gl.constexpr
):
    """Consumer warpgroup: every second tile of the program, or half of each tile."""
    ROWS: gl.constexpr = out.y.block_shape[0]
    FIRST: gl.constexpr = WG if tile.TURNS else 0
    STRIDE: gl.constexpr = 2 if tile.TURNS else 1
    FP8: gl.constexpr = out.x_scale is not None
    count = gl.cdiv(sizes.channels, tile.BK)
    for turn in range(FIRST, turns(sizes), STRIDE):
        place = locate(turn, sizes, tile)
        row = place.row if tile.TURNS else place.row + WG * ROWS
        column = place.column
        if FP8:
            acc, acc2 = _sum_fp8(shared, turn, count, WG, ROWS, tile)
            bias, bias2 = 0, 0  # loaded when needed: the sums use all registers
        elif tile.TURNS:  # load the bias late: its latency is hidden, and the sums use all registers
            acc, acc2 = _sum(shared, turn, count, WG, ROWS, tile)
            bias, bias2 = _load_bias(out.bias, column, sizes.out_channels, tile)
        else:
            bias, bias2 = _load_bias(out.bias, column, sizes.out_channels, tile)
            acc, acc2 = _sum(shared, turn, count, WG, ROWS, tile)
        store_wait(0)  # the previous tile has left the buffers
        y_s, y2_s = shared.y.index(WG), shared.y2.index(WG)
        _finish(out, out.y, y_s, acc, bias, row, column, sizes, ACTIVATION, ACTIVATION2, tile)
        if tile.RINGS == 2:
            store_wait(0)
            _finish(out, out.y, y_s, acc2, bias2, row + ROWS, column, sizes, ACTIVATION, ACTIVATION2, tile)
        elif tile.B2 > 0:
            column2 = column2_of(column, tile)
            _finish(out, out.y2, y2_s, acc2, bias2, row, column2, sizes, ACTIVATION, ACTIVATION2, tile)
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_linear_kernel(
    y, y2, x, w, w2, x_scale, scale, bias, residual, tokens, channels, out_channels, down, across,
    ACTIVATION: gl.constexpr, ACTIVATION2: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, DUAL: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """y (tokens, out_channels) from x (tokens, channels) and w (out_channels, channels); DUAL: w has twice the rows.

    These are descriptors; y2 and w2 are unused if B2 is 0. ACTIVATION2 is for the second product of DUAL.
    x_scale, scale: scales of fp8 tokens, and of the rows of an 8-bit weight.
    down, across: tiles of y. A program computes one tile in every round; in fp8 it has at least two if warpgroups
    compute their own tiles.
    """
    RINGS: gl.constexpr = 2 if TURNS and x_scale is not None else 1
    EARLY: gl.constexpr = scale is None or x_scale is not None
    tile: gl.constexpr = TileShape(B1, B2, BK, STAGES, TURNS, DUAL, RINGS, GROUP_M)
    inputs, out = Operands(x, w, w2), Outputs(y, y2, x_scale, scale, bias, residual)
    sizes = Sizes(tokens, channels, out_channels, down, across)
    shared = share(x.dtype, inputs, out, tile)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # named constants, because literals would not stay constexpr. The last lists give warps and registers of all
    # partitions but the first, which has the launch's four warps and the remaining registers
    if RINGS == 2:
        gl.warp_specialize([
            (_consume, (out, shared, sizes, FIRST, ACTIVATION, ACTIVATION2, tile)),
            (_consume, (out, shared, sizes, SECOND, ACTIVATION, ACTIVATION2, tile)),
            (produce, (inputs, shared, sizes, FIRST, EARLY, tile)),
            (produce, (inputs, shared, sizes, SECOND, EARLY, tile)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (out, shared, sizes, FIRST, ACTIVATION, ACTIVATION2, tile)),
            (_consume, (out, shared, sizes, SECOND, ACTIVATION, ACTIVATION2, tile)),
            (produce, (inputs, shared, sizes, FIRST, EARLY, tile)),
        ], [4, 1], [240, 24])  # fmt: skip
