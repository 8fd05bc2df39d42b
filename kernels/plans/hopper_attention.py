"""The tiles and launches of attention on sm_90 (`attention.hopper`), by a plan of `choices`.

Only the number of keys in a block affects the bits, so it depends only on a head's width and the number of keys.
"""

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from fastdiff.kernels.host.launching import gluon_descriptor, launch, multiprocessors, suits_descriptors
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.host.recording import because


class AttentionTiles(NamedTuple):
    """Tiles of the Gluon kernel, which streams blocks of keys past the queries."""

    parts: tuple[int, int]  # columns in the two parts of a head's width
    keys: int  # in a block
    groups: int  # warp groups, each with 64 queries
    stages: int = 2
    in_turn: bool = True
    persistent: bool = True
    resident: int = 1  # programs per multiprocessor


class FewKeys(NamedTuple):
    """Tiles of the Triton kernel, which keeps all keys on chip, in one part or two."""

    parts: tuple[int, int]
    stages: int
    resident: int


class AttentionPlan(NamedTuple):
    """The tiles of a plan."""

    tiles: AttentionTiles | FewKeys
    few: AttentionTiles | None = None  # if the queries fill at most `busy` tiles of 128 per multiprocessor
    busy: float = 0

    @property
    def in_gluon(self) -> bool:
        return not isinstance(self.tiles, FewKeys)


BLOCK = 64  # queries of a warp group, and of a tile of the kernel for few keys
FULL_TIME, SMALL_TIME = 5, 4  # relative times of a tile of 3 warp groups and of 2
# Registers per thread. REGISTERS_AT_LAUNCH: programs per multiprocessor -> the compiler's limit at the launch with one
# warp group, which gets more later. REGISTERS: number of warp groups -> registers of each warp group but the first.
REGISTERS_AT_LAUNCH = {1: 168, 2: 128, 3: 80}
REGISTERS = {1: 0, 2: 240, 3: 160}


def obstacle(plan: AttentionPlan, heads: int, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the plan's kernel cannot take these tensors; None if it can."""
    if isinstance(plan.tiles, FewKeys):  # other strides were not tried; the generic Triton kernel failed on some
        aligned = all(tensor.stride(1) % 16 == 0 for tensor in (q, k, v))
        near = q.shape[1] * q.stride(1) < 2**31  # offsets within a picture are 32-bit
        return None if aligned and near else "rows are not aligned to 16 channels, or are too far apart"
    aligned = q.shape[2] // heads % 8 == 0 and all(map(suits_descriptors, (q, k, v)))
    return None if aligned else "heads or rows are not aligned to 16 bytes"


def launch_plan(
    plan: AttentionPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Launch a plan's kernel: softmax(q k^T / sqrt(d) + bias) v. Only the Gluon kernel takes `lengths`."""
    out = q.new_empty(q.shape)
    if isinstance(plan.tiles, FewKeys):
        _launch_few_keys(plan.tiles, out, q, k, v, bias, heads, causal)
        return out
    tiles = plan.tiles
    if plan.few is not None:
        count = q.shape[0] * heads * triton.cdiv(q.shape[1], 2 * BLOCK)
        tiles = tiles if count > plan.busy * multiprocessors(q.device) else plan.few
    _launch_tiles(tiles, out, q, k, v, bias, lengths, heads, causal)
    return out


def _launch_tiles(
    tiles: AttentionTiles,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    heads: int,
    causal: bool,
) -> None:
    from fastdiff.kernels.device.hopper.attention import LOG2_E, hopper_attention_kernel  # imports Gluon

    pairs, keys, groups = q.shape[0] * heads, k.shape[1], tiles.groups
    blocks, programs = triton.cdiv(q.shape[1], BLOCK), tiles.resident * multiprocessors(q.device)
    full, small = _split(blocks, pairs, programs) if groups == 3 else (triton.cdiv(blocks, groups), 0)
    count = pairs * (full + small)
    limit: dict[str, Any] = {"maxnreg": REGISTERS_AT_LAUNCH[tiles.resident]} if groups == 1 else {}
    because(lambda: f"Gluon, {groups * BLOCK} queries x {tiles.keys} keys a step, columns as {_sum(tiles.parts)}")
    launch(
        hopper_attention_kernel, (min(count, programs) if tiles.persistent else count,),
        *_parts(out, heads, BLOCK, tiles), *_parts(q, heads, BLOCK, tiles), *_parts(k, heads, tiles.keys, tiles),
        *_parts(v, heads, tiles.keys, tiles), bias, lengths, heads, pairs, full, small, keys,
        (q.shape[2] // heads) ** -0.5 * LOG2_E.value,
        WGS=groups, D1=tiles.parts[0], D2=tiles.parts[1], BN=tiles.keys, STAGES=tiles.stages,
        TILES=2 if tiles.persistent else 1, EVEN=lengths is None and keys % tiles.keys == 0,
        IN_TURN=tiles.in_turn and groups > 1, CAUSAL=causal, REGISTERS=REGISTERS[groups], num_warps=4, **limit,
    )  # fmt: skip


def _parts(tensor: Tensor, heads: int, rows: int, tiles: AttentionTiles) -> tuple:
    """Return descriptors (N, heads, L, d) of blocks of rows, one for each part of the width.

    Without a second part, the second descriptor is the first.
    """
    n, length, channels = tensor.shape
    width, (picture, row, _) = channels // heads, tensor.stride()
    view = {"shape": [n, heads, length, width], "strides": [picture, width, row, 1]}
    return tuple(gluon_descriptor(tensor, [1, 1, rows, columns or tiles.parts[0]], **view) for columns in tiles.parts)


def _sum(parts: tuple[int, int]) -> str:
    return "{} + {}".format(*parts)


@cache
def _split(blocks: int, pairs: int, programs: int) -> tuple[int, int]:
    """Return how many tiles of 3 and of 2 warp groups each (picture, head) pair gets, for the earliest end of all."""
    halves = range(-(-blocks // 2) + 1)
    splits = [(max(0, -(-(blocks - 2 * small) // 3)), small) for small in halves]
    return min(splits, key=lambda split: _end(split[0] * pairs, split[1] * pairs, programs))


def _end(full: int, small: int, programs: int) -> int:
    """Return when the last program ends, if free programs take the next tile, the full ones first."""
    rounds, ahead = divmod(full, programs)
    ends = {rounds * FULL_TIME: programs - ahead, (rounds + 1) * FULL_TIME: ahead}  # end -> number of programs
    ends = {end: count for end, count in ends.items() if count}
    while small > 0:
        first = min(ends)
        count = ends.pop(first)
        ends[first + SMALL_TIME] = ends.get(first + SMALL_TIME, 0) + count
        small -= count
    return max(ends)


def _launch_few_keys(
    tiles: FewKeys, out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, heads: int, causal: bool
) -> None:
    from fastdiff.kernels.device.hopper.attention_few_keys import LOG2_E, few_keys_attention_kernel  # imports Triton

    (n, queries, channels), keys = q.shape, k.shape[1]
    width, blocks = channels // heads, triton.cdiv(queries, BLOCK)
    length = max(1, round(blocks * n * heads / (multiprocessors(q.device) * tiles.resident)))
    chunks = triton.cdiv(blocks, length)
    because(lambda: f"{BLOCK} queries a step, all keys on chip, as {_sum(tiles.parts)}")
    launch(
        few_keys_attention_kernel, (n * heads * chunks,),
        out, q, k, v, bias, heads, queries, keys, width**-0.5 * LOG2_E.value, chunks, length,
        *(stride for tensor in (q, k, v) for stride in tensor.stride()[:2]),
        CAUSAL=causal, WHOLE=keys == sum(tiles.parts), D=width, WIDTH=triton.next_power_of_2(width),
        BM=BLOCK, B1=tiles.parts[0], B2=tiles.parts[1], STAGES=tiles.stages, num_warps=4, num_stages=tiles.stages,
    )  # fmt: skip
