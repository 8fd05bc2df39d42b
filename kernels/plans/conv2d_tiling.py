"""How a convolution is divided among programs: the main loop, the tile and the number of chunks of k.

The moments tiles and the chunks of k affect the bits, so they depend only on the picture's shape. The tile, and whether
chunks are spread over programs, depend on the batch too, and do not affect the bits; tests check this.
"""

import math
from itertools import product
from typing import Any, NamedTuple

import torch

from fastdiff.kernels.host.recording import describe
from fastdiff.kernels.plans.choices import first
from fastdiff.kernels.plans.conv2d_problem import Problem
from fastdiff.kernels.plans.conv2d_tiles import (
    ARRIVAL_MICROSECONDS,
    ARRIVAL_TILES,
    CHUNK_MICROSECONDS,
    CHUNK_STEPS,
    CHUNK_TILE,
    CHUNKED,
    FEWEST_STEPS,
    FLAT_TILES,
    FLOAT32_CHUNK_STEPS,
    FLOAT32_TILES,
    LARGEST_NORMALISED,
    LONGEST_ROW,
    M_SIDE,
    MOST_CHUNKS,
    MOST_FILLED,
    NARROW_TILES,
    POINTER_ROW_MEMORY,
    POINTER_TILES,
    ROW_MEMORY,
    SMALL_MOMENTS,
    SMALL_PICTURE,
    SUM_MICROSECONDS,
    WIDEST_GROUP,
    Candidate,
    ConvTile,
    descriptor_tiles,
    row_tiles,
)
from fastdiff.kernels.plans.tuning import named, tuned


class ConvTiling(NamedTuple):
    """How one convolution is launched."""

    descriptors: bool  # whether tensor descriptors load; otherwise pointers do
    flat: bool  # pointers only: a step has any (tap, channel) pairs, not the channels of one tap
    rows: int  # of the pixel grid; with pointers, a row of the grid is a moments tile
    columns: int
    tile_width: int  # columns of a tile; rows, then pictures, fill the rest
    moments: int  # pixels in a moments tile, which has one mean and M2 for each channel
    tile: ConvTile
    chunks: int  # of the sum over k of each input
    steps: int  # per chunk
    spread: bool  # whether each chunk has its own program; a fused shortcut then has one too
    obstacle: str = ""  # why descriptors cannot load
    may_store: bool = True  # whether descriptors may store
    apart: bool = False  # whether `sum_chunks` adds the chunks of programs; otherwise the one that arrives last

    def on(self, device: torch.device, problem: Problem) -> "ConvTiling":
        """Return the tiling with the warps and stages for a card; they change no bit."""
        groups = self.tile_shape[0] * problem.group if problem.group and self.normalises(problem) else 0
        return self._replace(tile=self.tile.on(device, problem.x_itemsize, flat=self.flat, groups=groups))

    def describe(self) -> str:
        tile = f"{self.tile.pixels} pixels x {self.tile.channels} channels a program"
        loads = "by descriptors" if self.descriptors else f"by pointers ({self.obstacle})"
        spread = f", sum in {self.chunks} parts" if self.spread else ""
        return f"{loads}, {tile}{spread}"

    @property
    def candidate(self) -> Candidate:
        """The part of the tiling that a tuning table may choose."""
        tile = self.tile
        return Candidate(tile.pixels, tile.channels, tile.block, tile.warps, tile.stages, self.spread)

    def with_candidate(self, candidate: Candidate) -> "ConvTiling":
        """Return the tiling with another candidate, one of `alternatives`."""
        pixels, channels, block, warps, stages, spread = candidate
        may_swap = self.tile.swap or (self.descriptors and self.chunks > 1)  # not every tile for chunks is swapped
        swap = may_swap and (channels >= M_SIDE or (self.tile.swap and self.tile.channels < M_SIDE))
        tile = self.tile._replace(pixels=pixels, channels=channels, block=block, warps=warps, stages=stages, swap=swap)
        return self._replace(tile=tile, steps=self.steps * self.tile.block // block, spread=spread)

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """The pictures, rows and columns of a tile."""
        height = self.tile.pixels // self.tile_width
        if self.descriptors or self.rows == 1:
            height = min(height, _power_of_two_in(self.rows))
        return self.tile.pixels // (height * self.tile_width), height, self.tile_width

    @property
    def stores_chunks(self) -> bool:
        """Whether programs store chunks for `sum_chunks`."""
        return self.spread and self.apart

    @property
    def arrives(self) -> bool:
        """Whether the program of a tile that arrives last adds the chunks of all."""
        return self.spread and not self.apart

    @property
    def moments_tile(self) -> tuple[int, int]:
        """The rows and columns of a moments tile, which is as wide as a tile."""
        return self.moments // self.tile_width, self.tile_width

    def moments_tiles(self, problem: Problem) -> int:
        """Return the number of moments tiles in a picture."""
        return -(-problem.pixels // self.moments)

    def ragged(self, problem: Problem) -> bool:
        """Whether tiles reach past a picture's last pixel."""
        _, height, width = self.tile_shape
        return not self.descriptors and problem.pixels % (height * width) != 0

    def residual_by_descriptor(self, problem: Problem) -> bool:
        fits = problem.itemsize == 2 and problem.out_channels % 8 == 0
        return self.descriptors and not self.stores_chunks and problem.mode != "up" and fits

    def stores_by_descriptor(self, problem: Problem) -> bool:
        """Whether the copy engine stores the output tiles. For tiles of 8 warps it was slower."""
        whole = self.descriptors or self.rows * self.columns == problem.pixels
        unit = self.tile.channels if self.descriptors and problem.mode == "up" else 8
        fits = whole and problem.itemsize == 2 and problem.out_channels % unit == 0
        return fits and self.may_store and not self.stores_chunks and self.tile.warps == 4

    def normalises(self, problem: Problem) -> bool:
        """Whether a program computes whole groups of whole pictures. Depends only on the picture's shape."""
        if problem.row:
            whole = self.moments >= problem.pixels and not self.spread
        else:
            patch = self.tile_width * _power_of_two_in(self.rows)
            whole = self.descriptors and not self.apart and patch == problem.pixels <= LARGEST_NORMALISED
            whole = whole and problem.out_channels > NARROW_TILES[0].channels
        return whole and WIDEST_GROUP % problem.group == 0

    def parts(self, problem: Problem) -> int:
        """Return the number of chunks of all inputs."""
        return self.chunks * len(problem.channels)

    def least_pixels(self, problem: Problem) -> int:
        """Return the fewest pixels of a tile: a moments tile, or a whole picture if the program normalises."""
        return problem.pixels if problem.group and self.normalises(problem) else self.moments

    def fits(self, problem: Problem) -> bool:
        """Whether the tile has whole tiles of moments, or whole groups of whole pictures if the program normalises."""
        narrow = self.tile.channels < problem.group and self.normalises(problem)
        return self.tile.pixels >= self.least_pixels(problem) and not narrow

    def programs(self, problem: Problem) -> int:
        """Return the number of programs for one chunk (`spread`), or for all chunks."""
        pictures, height, width = self.tile_shape
        quarters = 4 if self.descriptors and problem.upsample else 1
        pixel_tiles = -(-problem.pictures // pictures) * -(-self.rows // height) * (self.columns // width) * quarters
        return pixel_tiles * -(-problem.out_channels // self.tile.channels)


def make_tiling(problem: Problem, *, obstacle: str | None, multiprocessors: int) -> ConvTiling:
    """Choose the tiling of a convolution.

    Args:
        obstacle: why the card or the tensors' addresses rule out descriptors; None if they do not.
    """
    grid = obstacle or _descriptor_grid(problem)
    if problem.row and problem.out_width <= LONGEST_ROW:
        return _row_tiling(problem, obstacle, grid if isinstance(grid, str) else "", multiprocessors)
    if isinstance(grid, str):
        return _pointer_tiling(problem, multiprocessors)._replace(obstacle=grid, may_store=obstacle is None)
    return _descriptor_tiling(problem, *grid, multiprocessors)


def _descriptor_grid(problem: Problem) -> tuple[int, int, int] | str:
    """Return the rows and columns of the pixel grid and the columns of a tile, or why descriptors cannot load."""
    rows, columns = problem.out_height, problem.out_width
    if problem.x_itemsize == 4:
        return "float32"
    unit = 16 // problem.x_itemsize
    if any(channels % unit for channels in problem.channels):  # a descriptor's strides are multiples of 16 bytes
        return f"{min(problem.channels, key=_power_of_two_in)} channels, not a multiple of {unit}"
    if problem.mode == "up":
        if (rows, columns) != (2 * problem.height, 2 * problem.width):
            return "upsampling with padding other than 1"
        rows, columns = problem.height, problem.width
    odd = problem.width % 2 or (problem.height % 2 and not problem.row)
    if problem.mode == "down" and (odd or problem.channels[0] % 32):
        return "stride 2 with an odd size, or with channels that are not a multiple of 32"
    tile_width = min(LONGEST_ROW if problem.row else 32, _power_of_two_in(columns))
    patch = tile_width * _power_of_two_in(rows)  # pixels of one picture in a tile; other pictures fill the rest
    if patch < min(64, rows * columns) and rows * columns * 64 // patch > MOST_FILLED:
        return f"tiles would cross the border of {rows}x{columns} pixels"
    return rows, columns, tile_width


def _descriptor_tiling(problem: Problem, rows: int, columns: int, tile_width: int, multiprocessors: int) -> ConvTiling:
    few = problem.pixels <= 4096 or problem.out_channels <= NARROW_TILES[0].channels
    most = SMALL_MOMENTS if problem.pixels <= SMALL_PICTURE else 64 if few else 128
    moments = min(tile_width * _power_of_two_in(rows), max(tile_width, most))
    block = 32 if problem.mode == "down" and problem.channels[0] % 64 else 64
    depth = _depth(problem, block)
    apart = _may_chunk(problem) and depth >= 4 * CHUNK_STEPS
    chunks = depth // CHUNK_STEPS if apart else _chunks(problem, depth)
    steps = depth if chunks == 1 else -(-depth // (2 * chunks)) * 2  # even, for tiles with twice the block
    chunks = -(-depth // steps)
    whole = block == 64 and all(channels % 128 == 0 for channels in problem.channels)
    if problem.out_channels <= NARROW_TILES[0].channels:
        tiles = [_first_busy(NARROW_TILES, problem, multiprocessors)]
    elif (measured := _measured_tile(problem)) is not None:
        tiles = [measured]
    else:
        tiles = descriptor_tiles(problem.out_channels, whole, problem.fp8)
    kinds = [(tile, spread) for tile in tiles for spread in ((False, True) if chunks > 1 else (False,))]
    if chunks > 1 and not apart and len(tiles) > 1 and not problem.fp8:
        kinds += [(CHUNK_TILE, False), *((tile, True) for tile in ARRIVAL_TILES if whole)]
    grid = rows, columns, tile_width
    tilings = [
        ConvTiling(True, False, *grid, moments, tile, chunks, steps * 64 // tile.block, spread, apart=apart)
        for tile, spread in kinds
    ]
    fitting = [tiling for tiling in tilings if tiling.fits(problem)]
    best = min(fitting, key=lambda tiling: _microseconds(tiling, problem, multiprocessors))
    return best._replace(tile=best.tile._replace(block=best.tile.block * block // 64))


def _row_tiling(problem: Problem, obstacle: str | None, no_descriptors: str, multiprocessors: int) -> ConvTiling:
    """Give each program whole rows and whole groups of channels, so that it can normalise its output."""
    row = 1 << (problem.out_width - 1).bit_length()
    why = no_descriptors or ("" if row == problem.out_width else f"{problem.out_width} pixels, not a power of two")
    flat = bool(why) and max(problem.channels) < 32
    tile = _row_tile(problem, row, flat, not why, multiprocessors)
    depth = _depth(problem, tile.block, flat)
    in_chunks = problem.x_itemsize == 4 and len(problem.channels) == 1
    steps = min(depth, FLOAT32_CHUNK_STEPS * 32 // tile.block) if in_chunks else depth
    return ConvTiling(not why, flat, 1, row, row, row, tile, -(-depth // steps), steps, False, why, obstacle is None)


def _row_tile(problem: Problem, row: int, flat: bool, descriptors: bool, multiprocessors: int) -> ConvTile:
    """Return the first tile that gives most multiprocessors as many programs as they can hold, otherwise the last."""
    tiles = row_tiles(problem.out_channels, problem.x_itemsize, flat, descriptors)
    fitted = [_fitted(tile, problem, row, descriptors) for tile in tiles]

    def is_busy(tile: ConvTile) -> bool:
        programs = -(-problem.pictures // (tile.pixels // row)) * -(-problem.out_channels // tile.channels)
        return programs >= (tile.resident - 0.25) * multiprocessors

    return next((tile for tile in fitted if is_busy(tile)), fitted[-1])


def _fitted(tile: ConvTile, problem: Problem, row: int, descriptors: bool) -> ConvTile:
    """Return the tile with at least a row of pixels, no channels beyond the output's, and at least a group's channels.

    Warps and stages follow from the tile's size. In float32 the block depends only on the input, so that chunks end at
    the same channels. At stride 2, a step of more channels than the input has would read into the next pixel.
    """
    pixels = max(tile.pixels, row)
    channels = min(tile.channels, _tile_channels(problem))
    if problem.group:
        channels = max(channels, math.gcd(problem.group, WIDEST_GROUP))
    least = 32 if problem.x_itemsize == 4 or problem.mode == "down" else 64
    block = min(tile.block, max(least, math.gcd(*problem.channels, 128)))
    most = 8 if pixels >= 128 and (problem.x_itemsize == 4 or channels >= 64) else 4
    memory = ROW_MEMORY if descriptors else POINTER_ROW_MEMORY
    return tile._replace(
        pixels=pixels, channels=channels, block=block,
        warps=min(most, tile.warps * (pixels // tile.pixels)),
        stages=max(2, min(tile.stages, memory // ((pixels + channels) * block * problem.x_itemsize))),
    )  # fmt: skip


def _measured_tile(problem: Problem) -> ConvTile | None:
    """Return the convolution's tile in the table of choices; None if it has none."""
    if problem.kernel != (3, 3) or problem.fp8:
        return None
    row = first(
        "conv2d tile", None, mode=problem.mode, pixels=problem.pixels, channels=sum(problem.channels),
        out_channels=problem.out_channels, pictures=problem.pictures,
    )  # fmt: skip
    return None if row is None else row.tiles


def tuned_tiling(tiling: ConvTiling, problem: Problem, call: Any) -> ConvTiling:
    """Return the tiling with the candidate that the card's tuning table names for this `Conv2dCall`."""

    def shape() -> str:
        loads = "descriptors" if tiling.descriptors else "pointers"
        given = describe((call.x, call.weight), vars(call) | dict.fromkeys(("x", "weight")))
        return named(given, call.parts[0].dtype, loads)

    usual = tiling.candidate
    chosen = tuned("conv2d", call.device, shape, usual, lambda: alternatives(tiling, problem))
    return tiling if chosen == usual else tiling.with_candidate(chosen)


def alternatives(tiling: ConvTiling, problem: Problem) -> list[Candidate]:
    """Return candidates that keep the order of every sum.

    They keep the moments tiles and the chunks of k, and change the block only in 16 bits, between whole blocks. A tile
    has whole moments tiles, and whole groups and pictures if it normalises. Hopper's own matrix instructions may round
    differently from others, so a candidate's M side (channels or pixels) is long enough for them if and only if the
    usual tile's is.
    """
    tile, small = tiling.tile, problem.row or problem.x_itemsize == 4
    wide, common = tiling.descriptors and not small, math.gcd(*problem.channels)
    whole = tiling.descriptors and tile.block >= 64 and common % 128 == 0 and not problem.fp8
    blocks = [n for n in (64, 128, 256) if common % n == tiling.steps * tile.block % n == 0] if whole else [tile.block]
    widths = [tile.channels]
    if not tiling.flat and tile.channels > NARROW_TILES[0].channels:
        least = math.gcd(problem.group, WIDEST_GROUP) if problem.group else 16
        most, long = max(tile.channels, _tile_channels(problem)), tile.channels >= M_SIDE
        either = wide or problem.x_itemsize == 4
        widths = [n for n in (16, 32, 64, 128) if least <= n <= most and (either or (n >= M_SIDE) == long)]
    most = 256 if tiling.descriptors or problem.row else 1 << (problem.pixels - 1).bit_length()
    sizes = {tile.pixels, 64, 128, *((16, 32) if wide or small else ()), *(() if small else (256,))}
    heights = sorted(pixels for pixels in sizes if tiling.least_pixels(problem) <= pixels <= most)
    spreads = (False, True) if tiling.chunks > 1 and not small else (tiling.spread,)
    found = []
    for pixels, channels, block in product(heights, widths, blocks):
        if wide and min(pixels, channels) < M_SIDE != max(pixels, channels):
            continue
        deepest = min(6, ROW_MEMORY // ((pixels + channels) * block * problem.x_itemsize))
        stages = {deepest // 2, deepest} & {2, 3, 4, 5, 6}
        warps = [count for count in (4, 8) if 64 * 32 * count <= max(pixels * channels, 64 * 128) <= 128 * 32 * count]
        found += [Candidate(pixels, channels, block, *rest) for rest in product(warps, sorted(stages), spreads)]
    return found


def _microseconds(tiling: ConvTiling, problem: Problem, multiprocessors: int) -> float:
    """Estimate the time of a tiling with descriptors from its tile's times."""
    tile = tiling.tile
    parts = tiling.parts(problem) if tiling.spread else 1
    most = -(-tiling.programs(problem) * parts // multiprocessors)  # programs of the busiest multiprocessor
    steps = problem.taps * sum(-(-channels // 64) for channels in problem.channels) / parts
    alone, busy = (steps * step + rest for step, rest in (tile.alone, tile.busy))
    rounds = -(-most // tile.resident)
    arrival = ARRIVAL_MICROSECONDS[0] + ARRIVAL_MICROSECONDS[1] * tile.pixels * tile.channels * parts
    border = CHUNK_MICROSECONDS[tile.holds_two_sums] * (tiling.parts(problem) - 1)
    extra = rounds * border if not tiling.spread else SUM_MICROSECONDS if tiling.apart else arrival
    return max(rounds * alone, most * busy) + extra


def _pointer_tiling(problem: Problem, multiprocessors: int) -> ConvTiling:
    flat = max(problem.channels) < 32
    tiles = FLOAT32_TILES if problem.x_itemsize == 4 else FLAT_TILES if flat else POINTER_TILES
    pixels = max(16, 1 << (problem.pixels - 1).bit_length())
    tile = _first_busy(tiles, problem, multiprocessors)
    tile = tile._replace(pixels=min(tile.pixels, pixels), channels=min(tile.channels, _tile_channels(problem)))
    moments = min(tiles[-1].pixels, pixels)
    depth = _depth(problem, tile.block, flat)
    steps, spread = depth, False
    if problem.x_itemsize == 4 and len(problem.channels) == 1:
        steps = min(depth, FLOAT32_CHUNK_STEPS)
    elif _may_chunk(problem) and depth >= 8 * CHUNK_STEPS:
        steps, spread = 2 * CHUNK_STEPS, 2 * _programs(tile, problem) <= multiprocessors
    rows = -(-problem.pixels // moments)
    return ConvTiling(False, flat, rows, moments, moments, moments, tile, -(-depth // steps), steps, spread, apart=True)


def _first_busy(tiles: tuple[ConvTile, ...], problem: Problem, multiprocessors: int) -> ConvTile:
    """Return the first tile that gives every multiprocessor a program, otherwise the last."""
    return next((tile for tile in tiles if _programs(tile, problem) >= multiprocessors), tiles[-1])


def _programs(tile: ConvTile, problem: Problem) -> int:
    return problem.pictures * -(-problem.pixels // tile.pixels) * -(-problem.out_channels // tile.channels)


def _tile_channels(problem: Problem) -> int:
    return max(16, 1 << (problem.out_channels - 1).bit_length())


def _may_chunk(problem: Problem) -> bool:
    return len(problem.channels) == 1 and problem.pixels <= SMALL_PICTURE


def _chunks(problem: Problem, depth: int) -> int:
    """Return the number of chunks of each input's sum, which the program that arrives last may add."""
    steps = problem.taps * sum(-(-channels // 64) for channels in problem.channels)
    fewest = next((fewest for pixels, fewest in CHUNKED if problem.pixels <= pixels), None)
    if fewest is None or steps < fewest or problem.row:
        return 1
    return max(1, min(MOST_CHUNKS, depth // FEWEST_STEPS))


def _depth(problem: Problem, block: int, flat: bool = False) -> int:
    """Return the number of steps in the whole sum over k, for the wider tensor."""
    channels = max(problem.channels)
    return -(-problem.taps * channels // block) if flat else problem.taps * -(-channels // block)


def _power_of_two_in(n: int) -> int:
    """Return the largest power of two that divides n."""
    return n & -n
