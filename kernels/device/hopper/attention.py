"""The Gluon kernel of `attention` over many keys: FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).

A producer warp loads blocks of keys and values with TMA. One to three consumer warpgroups, each with 64 queries, do the
products (wgmma) and the softmax. They issue their products in turn, so the exponentials of one warpgroup overlap with
the products of another. If programs are persistent, the loads of a tile overlap with the work on the previous tile.

The bits of a query depend on the order of its sums over keys, and so only on the key block. Neither the tiles of
queries, nor the warpgroups, nor the split of a head's width into D1 + D2 columns changes a bit.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.hopper.attention_loads import (
    Parts,
    Shape,
    Streams,
    Work,
    buffers,
    place_of,
    produce,
    tile_of,
    tiles_of,
)
from fastdiff.kernels.device.hopper.language import (
    async_store,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fastdiff.kernels.device.language import cuda
from fastdiff.kernels.device.math import LOG2_E

# Run-time arguments not worth a kernel variant.
SIZES = ("heads", "pairs", "full_tiles", "small_tiles", "keys")


class Walk(NamedTuple):
    """The state of 64 queries in the loop over keys."""

    acc: Any  # (64, D1) the output so far, first part of the width
    acc2: Any  # (64, D2) second part
    top: Any  # (64,) the running maximum of the scores
    total: Any  # (64,) the running sum of exponentials
    p: Any  # (64, BN) exponentials of the last block, not yet multiplied by its values


@gluon.constexpr_function
def _product(columns):
    """Return the layout of a warpgroup's product, (64, columns)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _rows(columns):
    """Return a layout of (rows, columns) over a warpgroup, with 16 bytes of a row per thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _keep(x):
    """Emit no instruction, but keep x in its registers until here, when the asynchronous product has read them."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def _begin_scores(own, keys, stage, shape: gl.constexpr):
    """Start q k^T, asynchronously."""
    BN: gl.constexpr = shape.BN
    scores = gl.zeros([64, BN], gl.float32, _product(BN))
    k = keys.parts.first.index(stage).reshape([BN, shape.D1]).permute((1, 0))
    scores = warpgroup_mma(own.first, k, scores, use_acc=False, is_async=True)
    if shape.D2 > 0:
        k = keys.parts.second.index(stage).reshape([BN, shape.D2]).permute((1, 0))
        scores = warpgroup_mma(own.second, k, scores, is_async=True)
    return scores


@gluon.jit
def _begin_values(p, values, stage, acc, acc2, shape: gl.constexpr):
    """Start adding p v to the output, asynchronously."""
    acc = warpgroup_mma(p, values.parts.first.index(stage).reshape([shape.BN, shape.D1]), acc, is_async=True)
    if shape.D2 > 0:
        acc2 = warpgroup_mma(p, values.parts.second.index(stage).reshape([shape.BN, shape.D2]), acc2, is_async=True)
    return acc, acc2


@gluon.jit
def _end_values(p, values, stage, acc, acc2, shape: gl.constexpr):
    """Wait until p v is added to the output, and release the buffer of values."""
    if shape.D2 > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    _keep(p)
    mbarrier.arrive(values.read.index(stage), count=1)
    return acc, acc2


@gluon.jit
def _clear(memory, first, COLUMNS: gl.constexpr, shape: gl.constexpr):
    """Write zeros to the rows of a block of values from row `first` on."""
    LAYOUT: gl.constexpr = _rows(COLUMNS)
    block = memory.reshape([shape.BN, COLUMNS])
    x = block.load(LAYOUT)
    is_seen = gl.expand_dims(gl.arange(0, shape.BN, gl.SliceLayout(1, LAYOUT)) < first, 1)
    block.store(gl.where(is_seen, x, 0.0).to(memory.dtype))


@gluon.jit
def _clear_unseen(values, tile, shape: gl.constexpr):
    """Write zeros to the values after a picture's last key, in the first block. They may be NaN.

    Every warpgroup does, before its own product reads them. So none of them waits for another.
    """
    first = tile.keys - tile.last * shape.BN
    if first < shape.BN:
        stage = tile.done % shape.STAGES
        mbarrier.wait(values.loaded.index(stage), tile.done // shape.STAGES & 1)
        _clear(values.parts.first.index(stage), first, shape.D1, shape)
        if shape.D2 > 0:
            _clear(values.parts.second.index(stage), first, shape.D2, shape)
        fence_async_shared()


@gluon.jit
def _times(acc, factor):
    """Multiply each row of a product by its factor."""
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def _operand(p, dtype: gl.constexpr, shape: gl.constexpr):
    """Return the probabilities as the register operand of the product with the values."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, _product(shape.D1), 2))


@gluon.jit
def _visible(scores, block, tile, WG: gl.constexpr, work, shape: gl.constexpr):
    """Add the bias of the keys to the scores, and apply the causal mask.

    Masked scores are finite, not -infinity. A query may attend to no key of the first blocks it visits; then each of
    those keys counts about 1, until a real score rescales their sum by 0. LEAST_BIAS is so low that the rounding of
    scores at that bias does not matter. LATER, for keys after the query, is below every other score, and its product
    with the scale is exact.
    """
    LEAST_BIAS: gl.constexpr = -(2.0**20)
    LATER: gl.constexpr = -(2.0**100)
    LAYOUT: gl.constexpr = _product(shape.BN)
    place = place_of(tile.number, work, shape)
    columns = block * shape.BN + gl.arange(0, shape.BN, gl.SliceLayout(0, LAYOUT))
    if work.bias_ptr is not None:
        places = place.picture * work.keys + columns
        biases = gl.load(work.bias_ptr + places, mask=columns < work.keys, other=0.0).to(gl.float32)
        scores += gl.expand_dims(gl.maximum(biases, LEAST_BIAS) * (LOG2_E / work.scale), 0)
    if shape.CAUSAL:
        rows = place.row + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        scores = gl.where(gl.expand_dims(columns, 0) <= gl.expand_dims(rows, 1), scores, LATER)
    return scores


@gluon.jit
def _first_block(own, inputs, work, tile, free_before, WG: gl.constexpr, shape: gl.constexpr):
    """Start the walk with the scores of the last block of keys, the only one that may be partial."""
    LAYOUT: gl.constexpr = _product(shape.BN)
    W2: gl.constexpr = shape.D2 if shape.D2 > 0 else 16
    acc = gl.zeros([64, shape.D1], gl.float32, _product(shape.D1))
    acc2 = gl.zeros([64, W2], gl.float32, _product(W2))
    stage = tile.done % shape.STAGES
    mbarrier.wait(inputs.k.loaded.index(stage), tile.done // shape.STAGES & 1)
    scores = _begin_scores(own, inputs.k, stage, shape)
    if shape.TILES > 1:  # the previous tile is written by now; release its buffer for the next queries
        store_wait(0)
        mbarrier.arrive(free_before, count=1, pred=tile.turn > 0)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(inputs.k.read.index(stage), count=1)
    scores = _visible(scores, tile.last, tile, WG, work, shape)
    if not shape.EVEN:
        columns = tile.last * shape.BN + gl.arange(0, shape.BN, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(gl.expand_dims(columns < tile.keys, 0), scores, -float("inf"))
    top = gl.max(scores, 1) * work.scale
    p = gl.exp2(scores * work.scale - gl.expand_dims(top, 1))
    return Walk(acc, acc2, top, gl.sum(p, 1), _operand(p, inputs.k.parts.first.dtype, shape))


@gluon.jit
def _next_block(walk, i, own, inputs, work, tile, turns, WG: gl.constexpr, shape: gl.constexpr):
    """Advance the walk by the scores of the i-th block of keys from the end and the values of the previous block."""
    count = tile.done + i
    stage, stage_before = count % shape.STAGES, (count - 1) % shape.STAGES
    if shape.IN_TURN:
        mbarrier.wait(turns.index(WG), (count - tile.turn - 1) & 1)
    mbarrier.wait(inputs.k.loaded.index(stage), count // shape.STAGES & 1)
    scores = _begin_scores(own, inputs.k, stage, shape)
    mbarrier.wait(inputs.v.loaded.index(stage_before), (count - 1) // shape.STAGES & 1)
    acc, acc2 = _begin_values(walk.p, inputs.v, stage_before, walk.acc, walk.acc2, shape)
    if shape.IN_TURN:
        mbarrier.arrive(turns.index((WG + 1) % shape.WGS), count=1)
    scores = warpgroup_mma_wait(2 if shape.D2 > 0 else 1, deps=[scores])
    mbarrier.arrive(inputs.k.read.index(stage), count=1)
    scores = _visible(scores, tile.last - i, tile, WG, work, shape)
    top = gl.maximum(walk.top, gl.max(scores, 1) * work.scale)
    p = gl.exp2(scores * work.scale - gl.expand_dims(top, 1))
    shrink = gl.exp2(walk.top - top)
    total = walk.total * shrink + gl.sum(p, 1)
    acc, acc2 = _end_values(walk.p, inputs.v, stage_before, acc, acc2, shape)
    acc = _times(acc, shrink)
    if shape.D2 > 0:
        acc2 = _times(acc2, shrink)
    return Walk(acc, acc2, top, total, _operand(p, inputs.k.parts.first.dtype, shape))


@gluon.jit
def _finish(walk, out, pieces, own, inputs, work, tile, WG: gl.constexpr, shape: gl.constexpr):
    """Add the values of the first block of keys, which comes last, and store the output via the queries' buffer."""
    count = tile.done + tile.last
    stage = count % shape.STAGES
    mbarrier.wait(inputs.v.loaded.index(stage), count // shape.STAGES & 1)
    acc, acc2 = _begin_values(walk.p, inputs.v, stage, walk.acc, walk.acc2, shape)
    acc, acc2 = _end_values(walk.p, inputs.v, stage, acc, acc2, shape)
    inverse = 1 / walk.total
    own.first.store(_times(acc, inverse).to(own.first.dtype))
    if shape.D2 > 0:
        own.second.store(_times(acc2, inverse).to(own.first.dtype))
    fence_async_shared()
    place = place_of(tile.number, work, shape)
    row = place.row + WG * 64
    async_store(out.first, [place.picture, place.head, row, 0], pieces.first)  # TMA drops rows and columns outside
    if shape.D2 > 0:
        async_store(out.second, [place.picture, place.head, row, shape.D1], pieces.second)


@gluon.jit
def _attend(out, pieces, inputs, work, tile, free_before, turns, WG: gl.constexpr, shape: gl.constexpr):
    """Attend a warpgroup's 64 queries of a tile, in shared memory, to all keys."""
    own = Parts(pieces.first.reshape([64, shape.D1]), pieces.first.reshape([64, shape.D1]))
    if shape.D2 > 0:
        own = Parts(own.first, pieces.second.reshape([64, shape.D2]))
    walk = _first_block(own, inputs, work, tile, free_before, WG, shape)
    if work.lengths_ptr is not None:
        _clear_unseen(inputs.v, tile, shape)
    for i in range(1, tile.last + 1):
        walk = _next_block(walk, i, own, inputs, work, tile, turns, WG, shape)
    _finish(walk, out, pieces, own, inputs, work, tile, WG, shape)


@gluon.jit
def _stand_by(inputs, tile, free_before, turns, WG: gl.constexpr, shape: gl.constexpr):
    """Release buffers and turns of a tile that has no queries for the last warpgroup."""
    if shape.TILES > 1:
        store_wait(0)
        mbarrier.arrive(free_before, count=1, pred=tile.turn > 0)
    for i in range(0, tile.last + 1):
        count = tile.done + i
        stage, phase = count % shape.STAGES, count // shape.STAGES & 1
        if shape.IN_TURN:
            mbarrier.wait(turns.index(WG), (count - tile.turn - 1) & 1, pred=i > 0)
            mbarrier.arrive(turns.index((WG + 1) % shape.WGS), count=1, pred=i > 0)
        mbarrier.wait(inputs.k.loaded.index(stage), phase)
        mbarrier.arrive(inputs.k.read.index(stage), count=1)
        mbarrier.wait(inputs.v.loaded.index(stage), phase)
        mbarrier.arrive(inputs.v.read.index(stage), count=1)


@gluon.jit
def _consume(out, inputs, work, turns, WG: gl.constexpr, shape: gl.constexpr):
    """Consumer warpgroup: process its 64 queries of each tile of this program."""
    queries = inputs.q
    turn = 0
    done = 0
    for number in range(gl.program_id(0), tiles_of(work), gl.num_programs(0)):
        tile = tile_of(number, turn, done, work, shape)
        buffer = turn % shape.TILES
        piece = buffer * shape.WGS + WG
        pieces = Parts(queries.parts.first.index(piece), queries.parts.second.index(piece))
        free_before = queries.read.index((turn + shape.TILES - 1) % shape.TILES)
        mbarrier.wait(queries.loaded.index(piece), turn // shape.TILES & 1)
        if WG < 2:
            _attend(out, pieces, inputs, work, tile, free_before, turns, WG, shape)
        else:
            if number < work.full_tiles * work.pairs:
                _attend(out, pieces, inputs, work, tile, free_before, turns, WG, shape)
            else:
                _stand_by(inputs, tile, free_before, turns, WG, shape)
        if shape.TILES == 1:
            store_wait(0)
            mbarrier.arrive(queries.read.index(0), count=1)
        turn += 1  # noqa: SIM113 (Triton has no enumerate)
        done += tile.last + 1
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_attention_kernel(
    out, out2, q, q2, k, k2, v, v2, bias_ptr, lengths_ptr, heads, pairs, full_tiles, small_tiles, keys, scale,
    WGS: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    TILES: gl.constexpr, EVEN: gl.constexpr, IN_TURN: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """softmax(q k^T scale + bias) v. Descriptors of (pictures, heads, rows, width), with blocks of D1 and D2 columns.

    scale includes log2(e), for exp2; bias, one value per key, does not. lengths_ptr: how many keys of each picture are
    read; None for all.
    """
    shape: gl.constexpr = Shape(WGS, D1, D2, BN, STAGES, TILES, EVEN, IN_TURN, CAUSAL)
    out, q, k, v = Parts(out, out2), Parts(q, q2), Parts(k, k2), Parts(v, v2)
    queries = buffers(q, TILES * WGS, 64, TILES, shape)
    inputs = Streams(queries, buffers(k, STAGES, BN, STAGES, shape), buffers(v, STAGES, BN, STAGES, shape))
    turns = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WGS):
        mbarrier.init(turns.index(i), count=1)
    if IN_TURN:
        mbarrier.arrive(turns.index(0), count=1)
    fence_async_shared()
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    work = Work(pairs, heads, full_tiles, small_tiles, keys, gl.cdiv(keys, BN) - 1, scale, bias_ptr, lengths_ptr)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    # named constants, because literals would not stay constexpr. The last lists give warps and registers of all
    # partitions but the first, which has the launch's four warps and the remaining registers
    if WGS == 1:
        gl.warp_specialize([
            (_consume, (out, inputs, work, turns, FIRST, shape)),
            (produce, (q, k, v, inputs, work, shape)),
        ], [1], [24])  # fmt: skip
    elif WGS == 2:
        gl.warp_specialize([
            (_consume, (out, inputs, work, turns, FIRST, shape)),
            (_consume, (out, inputs, work, turns, SECOND, shape)),
            (produce, (q, k, v, inputs, work, shape)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (out, inputs, work, turns, FIRST, shape)),
            (_consume, (out, inputs, work, turns, SECOND, shape)),
            (_consume, (out, inputs, work, turns, THIRD, shape)),
            (produce, (q, k, v, inputs, work, shape)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 32])  # fmt: skip
