"""Gluon, Triton's lower-level language with explicit copies, barriers and products, for the sm_90 kernels.

Names are those of Triton 3.9; some differ in 3.6. Without Triton, or with an incompatible Gluon, a stand-in lets
kernels be defined but not launched. `plans.confirmation` lists the versions in which they can be launched.
"""

from fastdiff.kernels.device.language import Absent

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    store_wait = tma.store_wait
    memory = gl.shared_memory_descriptor
    reinterpret = getattr(memory, "reinterpret", None) or memory._reinterpret
    SLICES = gl.constexpr(hasattr(memory, "reinterpret"))
except (ImportError, AttributeError):
    gluon = gl = mbarrier = Absent()
    async_load = async_store = store_wait = reinterpret = SLICES = fence_async_shared = warpgroup_mma = (
        warpgroup_mma_wait
    ) = Absent()


@gluon.jit
def pieces(memory, buffer, SIZE: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT pieces of shared memory, from piece FIRST of a buffer of SIZE pieces on, for `reinterpret`.

    Triton 3.6 and 3.7 cannot slice memory whose number of pieces is not a power of two, but they can reinterpret past
    the end of a piece. 3.9 is the reverse, and slices only at constant offsets. 3.8 can do neither, so convolutions do
    not compile there.
    """
    if SLICES:
        found = memory.slice(FIRST, COUNT, 0)
        for i in gl.static_range(1, memory.shape[0] // SIZE):
            if buffer == i:
                found = memory.slice(i * SIZE + FIRST, COUNT, 0)
        return found
    else:
        return memory.index(buffer * SIZE + FIRST)


__all__ = [
    "async_load",
    "async_store",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "pieces",
    "reinterpret",
    "store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
