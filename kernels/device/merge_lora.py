"""The Triton kernel of `merge_lora`: one launch for any number of weights, found through tables of addresses."""

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.device.math import await_inputs

# Columns of the tables, which are int64: one row for each weight, and one for each of its changes.
WEIGHT_COLUMNS = tl.constexpr(6)  # written to, read from, rows, columns, first change, end of its changes
CHANGE_COLUMNS = tl.constexpr(3)  # up, down, rank


@triton.jit
def merge_lora_kernel(
    weights_ptr, changes_ptr, factors_ptr, tiles_ptr,
    WEIGHT: tl.constexpr, FACTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute a tile of BM x BN of one weight. `tiles` (programs, 2) int32 has the weight and the tile in it.

    WEIGHT and FACTOR are the dtypes behind the addresses of weights, and of up and down.
    """
    await_inputs()
    weight = weights_ptr + tl.load(tiles_ptr + 2 * tl.program_id(0)) * WEIGHT_COLUMNS
    tile = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    rows, columns = tl.load(weight + 2).to(tl.int32), tl.load(weight + 3).to(tl.int32)
    across = tl.cdiv(columns, BN)
    row, column = tile // across * BM + tl.arange(0, BM), tile % across * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(tl.load(weight + 4).to(tl.int32), tl.load(weight + 5).to(tl.int32)):
        change = changes_ptr + i * CHANGE_COLUMNS
        up = tl.load(change).to(tl.pointer_type(FACTOR))
        down = tl.load(change + 1).to(tl.pointer_type(FACTOR))
        rank = tl.load(change + 2).to(tl.int32)
        product = tl.zeros((BM, BN), tl.float32)
        for first in range(0, rank, BK):
            k = first + tl.arange(0, BK)
            here = (row < rows)[:, None] & (k < rank)[None, :]
            a = tl.load(up + row[:, None].to(tl.int64) * rank + k[None, :], mask=here, other=0.0)
            here = (k < rank)[:, None] & (column < columns)[None, :]
            b = tl.load(down + k[:, None].to(tl.int64) * columns + column[None, :], mask=here, other=0.0)
            product = tl.dot(a, b, product, input_precision="ieee")
        total += product * tl.load(factors_ptr + i)
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    here = (row < rows)[:, None] & (column < columns)[None, :]
    loaded = tl.load(tl.load(weight + 1).to(tl.pointer_type(WEIGHT)) + at, mask=here, other=0.0)
    target = tl.load(weight).to(tl.pointer_type(WEIGHT))
    tl.store(target + at, (loaded.to(tl.float32) + total).to(WEIGHT), mask=here)
