"""The Gluon kernel of `linear`: y = activation(x weight^T + bias), by one program for each tile of y.

A tile is 128 tokens x (B1 + B2) output channels, two products side by side: its width need be no power of two, so that
the tiles of few tokens can fill a card in one wave. One warp has the copy engine (TMA) load a step of BK input channels
after another, as soon as a buffer is free; two warpgroups multiply it (wgmma), each by its 64 tokens.

Every sum over the input channels has one order, whatever the tile: the tile changes no bit.
"""

from typing import Any, NamedTuple

from fastdiff.kernels.device.hopper.language import (
    async_load,
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
from fastdiff.kernels.device.math import activate

SIZES = ("channels", "across")  # run-time numbers that are not worth a kernel variant


class Steps(NamedTuple):
    """The buffers of the steps under way, in shared memory, and their barriers."""

    x: Any  # (2 STAGES, 64, BK), of each step the tokens of the one warpgroup, then those of the other
    w: Any  # (STAGES, B1, BK)
    w2: Any  # (STAGES, B2, BK)
    loaded: Any  # (STAGES, 1)
    read: Any  # (STAGES, 1), by both warpgroups


class Place(NamedTuple):
    """The first element of a tile of y."""

    row: Any
    column: Any


@gluon.jit
def _load_weights(w, w2, steps, place, step, stage, B1: gl.constexpr, B2: gl.constexpr, BK: gl.constexpr):
    """Announce all that a step loads, and load its weights."""
    mbarrier.expect(steps.loaded.index(stage), (128 + B1 + B2) * BK * 2)
    async_load(w, [place.column, step * BK], steps.loaded.index(stage), steps.w.index(stage))
    if B2 > 0:
        async_load(w2, [place.column + B1, step * BK], steps.loaded.index(stage), steps.w2.index(stage))


@gluon.jit
def _produce(
    x, w, w2, steps, place, channels, B1: gl.constexpr, B2: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr
):
    """One warp: the steps, into the buffers as they become free.

    The first weights come before the kernel that makes x has ended: no kernel makes weights.
    """
    count = gl.cdiv(channels, BK)
    for step in gl.static_range(STAGES):
        if step < count:
            _load_weights(w, w2, steps, place, step, step, B1, B2, BK)
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    for step in range(count):
        stage = step % STAGES
        if step >= STAGES:
            mbarrier.wait(steps.read.index(stage), (step // STAGES & 1) ^ 1)
            _load_weights(w, w2, steps, place, step, stage, B1, B2, BK)
        async_load(x, [place.row, step * BK], steps.loaded.index(stage), steps.x.index(stage * 2))
        async_load(x, [place.row + 64, step * BK], steps.loaded.index(stage), steps.x.index(stage * 2 + 1))


@gluon.jit
def _finish(y, y_s, acc, bias_ptr, row, column, ACTIVATION: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Bias and activation of a part of a warpgroup's tile, and its way out by `y_s`."""
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + column + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))).to(gl.float32)
        acc += gl.expand_dims(bias, 0)
    y_s.store(activate(acc, ACTIVATION).to(y.dtype))


@gluon.jit
def _consume(
    y, y2, bias_ptr, steps, y_s, y2_s, place, channels,
    GROUP: gl.constexpr, ACTIVATION: gl.constexpr,
    B1: gl.constexpr, B2: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup, the first or the second: 64 tokens of the tile."""
    C2: gl.constexpr = B2 if B2 > 0 else 16
    L1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B1, 16])
    L2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C2, 16])
    acc = gl.zeros([64, B1], gl.float32, L1)
    acc2 = gl.zeros([64, C2], gl.float32, L2)
    for step in range(gl.cdiv(channels, BK)):
        stage = step % STAGES
        mbarrier.wait(steps.loaded.index(stage), step // STAGES & 1)
        x = steps.x.index(stage * 2 + GROUP)
        acc = warpgroup_mma(x, steps.w.index(stage).permute((1, 0)), acc, is_async=True)
        if B2 > 0:
            acc2 = warpgroup_mma(x, steps.w2.index(stage).permute((1, 0)), acc2, is_async=True)
            acc, acc2 = warpgroup_mma_wait(2, deps=[acc, acc2])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        # the products of this step run on; those of the step before are done
        mbarrier.arrive(steps.read.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    if B2 > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    row = place.row + GROUP * 64
    _finish(y, y_s.index(GROUP), acc, bias_ptr, row, place.column, ACTIVATION, B1, L1)
    if B2 > 0:
        _finish(y2, y2_s.index(GROUP), acc2, bias_ptr, row, place.column + B1, ACTIVATION, B2, L2)
    fence_async_shared()
    async_store(y, [row, place.column], y_s.index(GROUP))  # writes no rows outside
    if B2 > 0:
        async_store(y2, [row, place.column + B1], y2_s.index(GROUP))
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_linear_kernel(
    y, y2, x, w, w2, bias_ptr, channels, across,
    ACTIVATION: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """y (tokens, across * (B1 + B2)) of x (tokens, channels) and w (.., channels), all descriptors.

    y2 and w2 are y and w in blocks of B2 columns; where B2 is 0 nothing is read of them.
    """
    y_s = gl.allocate_shared_memory(y.dtype, [2, 64, B1], y.layout)
    y2_s = y_s
    x_s = gl.allocate_shared_memory(x.dtype, [STAGES * 2, 64, BK], x.layout)
    w_s = gl.allocate_shared_memory(x.dtype, [STAGES, B1, BK], w.layout)
    w2_s = w_s
    if B2 > 0:
        y2_s = gl.allocate_shared_memory(y.dtype, [2, 64, B2], y2.layout)
        w2_s = gl.allocate_shared_memory(x.dtype, [STAGES, B2, BK], w2.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(read.index(i), count=2)
    fence_async_shared()
    steps = Steps(x_s, w_s, w2_s, loaded, read)
    place = Place(gl.program_id(0) // across * 128, gl.program_id(0) % across * (B1 + B2))
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # constants by their names: a literal would lose that it is one. At the end are the warps and the registers of all
    # but the first; that has the four warps of the launch, and the registers that are left
    gl.warp_specialize([
        (_consume, (y, y2, bias_ptr, steps, y_s, y2_s, place, channels, FIRST, ACTIVATION, B1, B2, BK, STAGES)),
        (_consume, (y, y2, bias_ptr, steps, y_s, y2_s, place, channels, SECOND, ACTIVATION, B1, B2, BK, STAGES)),
        (_produce, (x, w, w2, steps, place, channels, B1, B2, BK, STAGES)),
    ], [4, 1], [200, 24])  # fmt: skip
