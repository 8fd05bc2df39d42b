"""How a convolution is cut into programs: which main loop, which tile, which statistics tile, how many chunks of k.

What decides bits (statistics tiles, chunks) depends on the picture's shape alone; the tile depends on the batch too.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Problem:
    """The sizes of one convolution, `kernels.conv2d.conv2d`'s."""

    images: int
    height: int  # of the input
    width: int
    channels: tuple[int, ...]  # of each input tensor
    out_channels: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int, int, int]  # left, right, top, bottom
    upsample: bool
    itemsize: int

    @property
    def out_height(self) -> int:
        height = self.height << self.upsample
        return (height + self.padding[2] + self.padding[3] - self.kernel[0]) // self.stride + 1

    @property
    def out_width(self) -> int:
        width = self.width << self.upsample
        return (width + self.padding[0] + self.padding[1] - self.kernel[1]) // self.stride + 1

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.images, self.out_height, self.out_width, self.out_channels

    @property
    def pixels(self) -> int:
        return self.out_height * self.out_width

    @property
    def mode(self) -> str:
        return "up" if self.upsample else "down" if self.stride == 2 else "same"

    def depth(self, block: int, flat: bool = False) -> int:
        """Steps of `block` input channels (`flat`: of (tap, channel) pairs) in the sum over k, of the wider tensor."""
        taps, channels = math.prod(self.kernel), max(self.channels)
        return -(-taps * channels // block) if flat else taps * -(-channels // block)


SUM_CHANNELS = 32  # of a program of the ordered sum of chunks


class Tile(NamedTuple):
    """The piece of the output that one program makes, and how."""

    pixels: int
    channels: int
    swap: bool  # channels on the matrix unit's M side
    warps: int
    stages: int


class Plan(NamedTuple):
    descriptors: bool  # loads by tensor descriptor, else by pointer
    rows: int  # of the grid of pixels
    columns: int
    tile: Tile
    tile_width: int  # columns of a tile; rows and pictures fill it up
    block: int  # input channels of a step
    flat: bool  # by pointer: a step is `block` of all (tap, channel) pairs, not of one tap's channels
    statistics: int  # pixels of a statistics tile
    chunks: int  # of the sum over k
    steps: int  # of a chunk
    spread: bool  # a program makes one chunk, not all

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """Pictures, rows and columns of a tile."""
        if not self.descriptors:
            return 1, self.tile.pixels // self.tile_width, self.tile_width
        height = min(self.tile.pixels // self.tile_width, power_of_two_in(self.rows))
        return self.tile.pixels // (height * self.tile_width), height, self.tile_width

    @property
    def statistics_tile(self) -> tuple[int, int]:
        """Rows and columns of a statistics tile, as wide as a tile."""
        return self.statistics // self.tile_width, self.tile_width

    def statistics_tiles(self, problem: Problem) -> int:
        """Statistics tiles of a picture."""
        return -(-problem.pixels // self.statistics)

    def ragged(self, problem: Problem) -> bool:
        """Whether tiles reach past the picture's last pixel."""
        return problem.pixels % (self.tile.pixels if not self.descriptors else self.statistics) != 0

    def residual_by_descriptor(self, problem: Problem) -> bool:
        return problem.mode != "up" and problem.out_channels % 8 == 0

    def programs(self, problem: Problem) -> int:
        """Programs that make one chunk, or all of them."""
        pictures, height, width = self.tile_shape
        quarters = 4 if self.descriptors and problem.upsample else 1
        pixel_tiles = -(-problem.images // pictures) * -(-self.rows // height) * (self.columns // width) * quarters
        return pixel_tiles * -(-problem.out_channels // self.tile.channels)


# Best first for many programs: large tiles reuse more of what they load.
TILES = (
    Tile(256, 128, True, 8, 3),
    Tile(128, 128, True, 8, 4),
    Tile(128, 64, True, 4, 4),
    Tile(64, 64, True, 4, 5),
)
NARROW_TILE = Tile(128, 16, False, 4, 4)  # up to 16 output channels, the U-Net's last convolution
POINTER_TILES = (Tile(128, 64, True, 4, 3), Tile(64, 64, True, 4, 3))
FLOAT32_TILES = (Tile(64, 64, False, 4, 2), Tile(32, 32, False, 4, 2))


def power_of_two_in(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n


def make_plan(problem: Problem, *, descriptors: bool, multiprocessors: int) -> Plan:
    """`descriptors`: the card and the tensors' addresses allow them."""
    grid = _descriptor_grid(problem) if descriptors else None
    if grid is None:
        return _pointer_plan(problem, multiprocessors)
    rows, columns, tile_width, block = grid
    whole = tile_width * power_of_two_in(rows)
    statistics = min(whole, 64 if problem.pixels <= 4096 else 128)
    tiles = (NARROW_TILE,) if problem.out_channels <= 16 else TILES
    if problem.out_channels <= 64:
        tiles = tuple(tile for tile in tiles if tile.channels <= 64)
    tile = _choose(tiles, problem, multiprocessors)
    chunks, steps = _chunks(problem, block)
    spread = chunks > 1 and _programs(tile, problem) * 2 <= multiprocessors
    return Plan(True, rows, columns, tile, tile_width, block, False, statistics, chunks, steps, spread)


def _descriptor_grid(problem: Problem) -> tuple[int, int, int, int] | None:
    """Rows and columns of the grid, a tile's columns and input channels; None where descriptors do not fit."""
    rows, columns = problem.out_height, problem.out_width
    if problem.itemsize != 2 or any(channels % 8 for channels in problem.channels):
        return None  # a descriptor's strides are multiples of 16 bytes
    block = 64 if min(problem.channels) > 32 else 32
    if problem.mode == "up":
        if (rows, columns) != (2 * problem.height, 2 * problem.width):
            return None
        rows, columns = problem.height, problem.width
    if problem.mode == "down" and (problem.height % 2 or problem.width % 2 or problem.channels[0] % block):
        return None
    tile_width = min(32, power_of_two_in(columns))
    exact = tile_width * power_of_two_in(rows)
    if exact < min(64, rows * columns):
        return None  # a tile would cross the picture's border
    return rows, columns, tile_width, block


def _pointer_plan(problem: Problem, multiprocessors: int) -> Plan:
    tiles = POINTER_TILES if problem.itemsize == 2 else FLOAT32_TILES
    pixels = max(16, 1 << (problem.pixels - 1).bit_length())
    tile = _choose(tiles, problem, multiprocessors)
    tile = tile._replace(pixels=min(tile.pixels, pixels))
    statistics = min(tiles[-1].pixels, pixels)
    if problem.out_channels <= 16:
        tile = tile._replace(channels=16)
    block = 32
    flat = max(problem.channels) < block
    chunks, steps = _chunks(problem, block, flat)
    spread = chunks > 1 and _programs(tile, problem) * 2 <= multiprocessors
    rows = -(-problem.pixels // statistics)
    return Plan(False, rows, statistics, tile, statistics, block, flat, statistics, chunks, steps, spread)


def _choose(tiles: tuple[Tile, ...], problem: Problem, multiprocessors: int) -> Tile:
    """The first tile that keeps the card busy, else the smallest."""
    busy = (tile for tile in tiles if _programs(tile, problem) >= 0.8 * multiprocessors)
    return next(busy, tiles[-1])


def _programs(tile: Tile, problem: Problem) -> int:
    return -(-problem.images * problem.pixels // tile.pixels) * -(-problem.out_channels // tile.channels)


def _chunks(problem: Problem, block: int, flat: bool = False) -> tuple[int, int]:
    """Number of chunks and steps of a chunk."""
    depth = problem.depth(block, flat)
    chunks = 1
    if len(problem.channels) == 1 and problem.pixels <= 256:
        chunks = max(1, min(4, depth // 8))
    steps = -(-depth // chunks)
    return -(-depth // steps), steps
