"""Sums whose parts are computed by several programs: the program of a tile that arrives last adds them, in order.

The grid is (tiles, parts). Which program arrives last changes no bit.
"""

from fastdiff.kernels.device.language import tl, triton


@triton.jit
def arrives_last(partial_ptr, arrived_ptr, acc, PARTS: tl.constexpr):
    """Store this program's part, acc (A, B), and return whether all other parts of its tile are stored already.

    partial_ptr: (tiles, PARTS, A, B) float32. arrived_ptr: (tiles,) int32, zeros; the program that arrives last makes
    its counter zero again.
    """
    tile = tl.program_id(0)
    tl.store(_places(partial_ptr, acc, tl.program_id(1), PARTS), acc, cache_modifier=".cg")
    tl.debug_barrier()  # all threads store before one of them counts
    is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
    if is_last:
        tl.store(arrived_ptr + tile, 0)
    return is_last


@triton.jit
def sum_of_parts(partial_ptr, acc, SUMMED: tl.constexpr, PARTS: tl.constexpr):
    """Return the sum of the tile's first SUMMED parts, which have the shape of acc."""
    total = load_part(partial_ptr, acc, 0, PARTS)
    for part in tl.static_range(1, SUMMED):
        total += load_part(partial_ptr, acc, part, PARTS)
    return total


@triton.jit
def load_part(partial_ptr, acc, part, PARTS: tl.constexpr):
    """Load a part of the tile's sum. `.cg` bypasses the L1, which may hold stale data."""
    return tl.load(_places(partial_ptr, acc, part, PARTS), cache_modifier=".cg")


@triton.jit
def _places(partial_ptr, acc, part, PARTS: tl.constexpr):
    """Return the pointers to a part of this program's tile."""
    A: tl.constexpr = acc.shape[0]
    B: tl.constexpr = acc.shape[1]
    index = tl.program_id(0).to(tl.int64) * PARTS + part
    return partial_ptr + index * (A * B) + tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
