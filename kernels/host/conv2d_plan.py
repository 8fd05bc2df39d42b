"""How a convolution is cut into programs: which main loop, which tile, how many chunks of k.

What decides bits, the statistics tiles and the chunks of k, depends on the picture's shape alone. The tile, and whether
chunks are spread over programs, depend on the batch too, and change none: the tests compare.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Problem:
    """The sizes of one convolution, those of `kernels.conv2d.conv2d`."""

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
    def fits_int32(self) -> bool:
        """Whether there are pictures, and 32 bits count the elements of one, as the kernels do."""
        most = max(self.height * self.width * max(self.channels), self.pixels * self.out_channels)
        return self.images > 0 and most < 2**31

    @property
    def mode(self) -> str:
        return "up" if self.upsample else "down" if self.stride == 2 else "same"

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)


class Tile(NamedTuple):
    """The piece of the output that one program makes, and how; what it takes, in microseconds on one H200.

    A program alone on its multiprocessor waits for its loads; several at once are held up by each other's products.
    """

    pixels: int
    channels: int
    block: int  # input channels of a step
    warps: int
    stages: int
    swap: bool = True  # channels on the matrix unit's M side
    resident: int = 1  # programs that a multiprocessor holds at once
    alone: tuple[float, float] = (0.0, 0.0)  # 64 channels of a step, and all else, of a program that runs alone
    busy: tuple[float, float] = (0.0, 0.0)  # the same of each program on a full multiprocessor


# Descriptors, 16-bit. The times are fitted to 700 measured convolutions of three U-Nets, batches 1 to 512.
TILES = (
    Tile(128, 128, 64, warps=4, stages=3, resident=2, alone=(0.32, 4.8), busy=(0.34, 2.7)),
    Tile(256, 128, 64, warps=8, stages=3, resident=1, alone=(0.72, 6.0), busy=(0.72, 6.0)),
    Tile(128, 64, 64, warps=4, stages=3, resident=3, alone=(0.21, 4.0), busy=(0.27, 1.2)),
    Tile(128, 64, 128, warps=4, stages=4, resident=1, alone=(0.17, 3.8), busy=(0.19, 0.7)),
    Tile(64, 64, 64, warps=4, stages=5, resident=2, alone=(0.17, 3.2), busy=(0.14, 1.6)),
    Tile(64, 64, 128, warps=4, stages=6, resident=1, alone=(0.075, 3.9), busy=(0.13, 2.5)),
)
WIDE_TILE = Tile(256, 64, 64, warps=4, stages=2, resident=2, alone=(0.51, 5.1), busy=(0.47, 3.4))
# Measured better than the times say, where the tile makes so many programs or more:
# (mode, output pixels, input channels, output channels) of a 3x3 convolution.
MANY = 200
TUNED = {
    ("same", 128 * 128, 320, 320): (TILES[1], MANY),
    ("same", 64 * 64, 256, 256): (TILES[1], MANY),
    ("same", 64 * 64, 320, 320): (TILES[2], MANY),
    ("same", 64 * 64, 640, 640): (Tile(128, 128, 64, warps=8, stages=4), MANY),
    ("same", 32 * 32, 1280, 1280): (TILES[1], 80),
    ("same", 32 * 32, 64, 64): (WIDE_TILE, MANY),
    ("same", 32 * 32, 128, 64): (WIDE_TILE, MANY),
    ("same", 32 * 32, 192, 64): (WIDE_TILE, MANY),
}
SUM_MICROSECONDS = 3.0  # of `sum_chunks`
CHUNK_MICROSECONDS = 0.7  # of a chunk more in a program: its loads start anew
# Up to 16 output channels, the last convolution of a U-Net: the first that fills the card, else the last.
NARROW_TILES = (Tile(256, 16, 64, warps=4, stages=3, swap=False), Tile(64, 16, 64, warps=4, stages=4, swap=False))
# By pointers, likewise: any channels; less than a block of them, the first convolution of a U-Net; float32.
POINTER_TILES = (Tile(128, 64, 32, warps=4, stages=3), Tile(64, 64, 32, warps=4, stages=3))
FLAT_TILES = (Tile(128, 128, 32, warps=4, stages=2), Tile(64, 64, 32, warps=4, stages=2))
FLOAT32_TILES = (
    Tile(64, 64, 32, warps=4, stages=2, swap=False),
    Tile(32, 32, 32, warps=4, stages=2, swap=False),
)

MOST_FILLED = 2048  # pixels that the tiles of a picture alone may take, where only more pictures would fill them
SUM_CHANNELS = 32  # of a program of `sum_chunks`
SMALL_PICTURE = 256  # pixels, up to which k may be cut into chunks
CHUNK_STEPS = 30  # of 64 channels each, of a chunk at least
FLOAT32_CHUNK_STEPS = 4  # of 32 channels each: one long float32 sum would be thrice as far off as cuDNN's


class Plan(NamedTuple):
    descriptors: bool  # loads by tensor descriptor, else by pointer
    flat: bool  # by pointer: a step is of any (tap, channel) pairs, not of one tap's channels
    rows: int  # of the grid of pixels; by pointer, its columns are the pixels of a statistics tile
    columns: int
    tile_width: int  # columns of a tile; rows, then pictures, fill it up
    statistics: int  # pixels of a statistics tile
    tile: Tile
    chunks: int  # of the sum over k
    steps: int  # of a chunk
    spread: bool  # a program makes one chunk, not all
    obstacle: str = ""  # why descriptors do not load
    may_store: bool = True  # by descriptors

    def describe(self) -> str:
        tile = f"{self.tile.pixels} pixels x {self.tile.channels} channels a program"
        loads = "by descriptors" if self.descriptors else f"by pointers ({self.obstacle})"
        spread = f", sum in {self.chunks} parts" if self.spread else ""
        return f"{loads}, {tile}{spread}"

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """Pictures, rows and columns of a tile."""
        height = self.tile.pixels // self.tile_width
        if self.descriptors:
            height = min(height, _power_of_two_in(self.rows))
        return self.tile.pixels // (height * self.tile_width), height, self.tile_width

    @property
    def statistics_tile(self) -> tuple[int, int]:
        """Rows and columns of a statistics tile, as wide as a tile."""
        return self.statistics // self.tile_width, self.tile_width

    def statistics_tiles(self, problem: Problem) -> int:
        """Statistics tiles of a picture."""
        return -(-problem.pixels // self.statistics)

    def ragged(self, problem: Problem) -> bool:
        """Whether tiles reach past a picture's last pixel."""
        return not self.descriptors and problem.pixels % self.tile.pixels != 0

    def residual_by_descriptor(self, problem: Problem) -> bool:
        return self.descriptors and not self.spread and problem.mode != "up" and problem.out_channels % 8 == 0

    def stores_by_descriptor(self, problem: Problem) -> bool:
        """Whether the copy engine stores the output's tiles: not those of 8 warps, which it was slower for."""
        whole = self.descriptors or self.rows * self.columns == problem.pixels
        unit = self.tile.channels if self.descriptors and problem.mode == "up" else 8  # channels that none may exceed
        fits = whole and problem.itemsize == 2 and problem.out_channels % unit == 0
        return fits and self.may_store and not self.spread and self.tile.warps == 4

    def normalises(self, problem: Problem, num_groups: int) -> bool:
        """Whether a program has all of each group it makes, of whole pictures; depends on the picture's shape alone."""
        whole = self.descriptors and self.chunks == 1 and self.statistics == problem.pixels
        width = problem.out_channels // num_groups
        return whole and problem.out_channels > NARROW_TILES[0].channels and TILES[-1].channels % width == 0

    def programs(self, problem: Problem) -> int:
        """Programs of one chunk, or of all."""
        pictures, height, width = self.tile_shape
        quarters = 4 if self.descriptors and problem.upsample else 1
        pixel_tiles = -(-problem.images // pictures) * -(-self.rows // height) * (self.columns // width) * quarters
        return pixel_tiles * -(-problem.out_channels // self.tile.channels)


def make_plan(problem: Problem, *, obstacle: str | None, multiprocessors: int) -> Plan:
    """`obstacle`: why the card or the tensors' addresses rule descriptors out, if they do."""
    grid = obstacle or _descriptor_grid(problem)
    if isinstance(grid, str):
        return _pointer_plan(problem, multiprocessors)._replace(obstacle=grid, may_store=obstacle is None)
    return _descriptor_plan(problem, *grid, multiprocessors)


def _descriptor_grid(problem: Problem) -> tuple[int, int, int] | str:
    """Rows and columns of the grid of pixels, and a tile's columns; or why descriptors do not fit."""
    rows, columns = problem.out_height, problem.out_width
    if problem.itemsize != 2:
        return "float32"
    if any(channels % 8 for channels in problem.channels):  # a descriptor's strides are multiples of 16 bytes
        return f"{min(problem.channels, key=_power_of_two_in)} channels, no multiple of 8"
    if problem.mode == "up":
        if (rows, columns) != (2 * problem.height, 2 * problem.width):
            return "upsampling with another padding than 1"
        rows, columns = problem.height, problem.width
    if problem.mode == "down" and (problem.height % 2 or problem.width % 2 or problem.channels[0] % 32):
        return "stride 2 of an odd size, or of channels no multiple of 32"
    tile_width = min(32, _power_of_two_in(columns))
    patch = tile_width * _power_of_two_in(rows)  # pixels of a picture in a tile, which other pictures fill up
    if patch < min(64, rows * columns) and rows * columns * 64 // patch > MOST_FILLED:
        return f"tiles would cross the border of {rows}x{columns} pixels"
    return rows, columns, tile_width


def _descriptor_plan(problem: Problem, rows: int, columns: int, tile_width: int, multiprocessors: int) -> Plan:
    few = problem.pixels <= 4096 or problem.out_channels <= NARROW_TILES[0].channels
    statistics = min(tile_width * _power_of_two_in(rows), 64 if few else 128)
    block = 32 if problem.mode == "down" and problem.channels[0] % 64 else 64
    depth = _depth(problem, block)
    chunks = depth // CHUNK_STEPS if _may_chunk(problem) and depth >= 4 * CHUNK_STEPS else 1
    steps = depth if chunks == 1 else -(-depth // (2 * chunks)) * 2  # even, for tiles of twice the block
    chunks = -(-depth // steps)
    if problem.out_channels <= NARROW_TILES[0].channels:
        tiles = [_first_busy(NARROW_TILES, problem, multiprocessors)]
    elif (tuned := _tuned(problem)) is not None:
        tiles = [tuned]
    else:
        whole = block == 64 and all(channels % 128 == 0 for channels in problem.channels)
        widest = max(64, problem.out_channels)
        fitting = [tile for tile in TILES if tile.channels <= widest and tile.pixels >= statistics]
        tiles = [tile for tile in fitting if tile.block == 64 or whole]
    plans = [
        Plan(True, False, rows, columns, tile_width, statistics, tile, chunks, steps * 64 // tile.block, spread)
        for tile in tiles
        for spread in ((False, True) if chunks > 1 else (False,))
    ]
    best = min(plans, key=lambda plan: _microseconds(plan, problem, multiprocessors))
    return best._replace(tile=best.tile._replace(block=best.tile.block * block // 64))


def _tuned(problem: Problem) -> Tile | None:
    key = problem.mode, problem.pixels, sum(problem.channels), problem.out_channels
    if key not in TUNED or problem.kernel != (3, 3):
        return None
    tile, fewest = TUNED[key]
    return tile if _programs(tile, problem) >= fewest else None


def _microseconds(plan: Plan, problem: Problem, multiprocessors: int) -> float:
    """What a plan by descriptors takes, by the times of its tile."""
    tile = plan.tile
    parts = plan.chunks if plan.spread else 1
    most = -(-plan.programs(problem) * parts // multiprocessors)  # programs of the busiest multiprocessor
    steps = problem.taps * sum(-(-channels // 64) for channels in problem.channels) / parts
    alone, busy = (steps * step + rest for step, rest in (tile.alone, tile.busy))
    rounds = -(-most // tile.resident)
    extra = SUM_MICROSECONDS if plan.spread else rounds * CHUNK_MICROSECONDS * (plan.chunks - 1)
    return max(rounds * alone, most * busy) + extra


def _pointer_plan(problem: Problem, multiprocessors: int) -> Plan:
    flat = max(problem.channels) < 32
    tiles = FLOAT32_TILES if problem.itemsize == 4 else FLAT_TILES if flat else POINTER_TILES
    pixels = max(16, 1 << (problem.pixels - 1).bit_length())
    tile = _first_busy(tiles, problem, multiprocessors)
    tile = tile._replace(pixels=min(tile.pixels, pixels), channels=min(tile.channels, _tile_channels(problem)))
    statistics = min(tiles[-1].pixels, pixels)
    depth = _depth(problem, tile.block, flat)
    steps, spread = depth, False
    if problem.itemsize == 4 and len(problem.channels) == 1:
        steps = min(depth, FLOAT32_CHUNK_STEPS)
    elif _may_chunk(problem) and depth >= 8 * CHUNK_STEPS:
        steps, spread = 2 * CHUNK_STEPS, 2 * _programs(tile, problem) <= multiprocessors
    rows = -(-problem.pixels // statistics)
    return Plan(False, flat, rows, statistics, statistics, statistics, tile, -(-depth // steps), steps, spread)


def _first_busy(tiles: tuple[Tile, ...], problem: Problem, multiprocessors: int) -> Tile:
    """The first tile that makes a program for every multiprocessor, else the last."""
    return next((tile for tile in tiles if _programs(tile, problem) >= multiprocessors), tiles[-1])


def _programs(tile: Tile, problem: Problem) -> int:
    return problem.images * -(-problem.pixels // tile.pixels) * -(-problem.out_channels // tile.channels)


def _tile_channels(problem: Problem) -> int:
    return max(16, 1 << (problem.out_channels - 1).bit_length())


def _may_chunk(problem: Problem) -> bool:
    return len(problem.channels) == 1 and problem.pixels <= SMALL_PICTURE


def _depth(problem: Problem, block: int, flat: bool = False) -> int:
    """Steps of the whole sum over k, of the wider tensor."""
    channels = max(problem.channels)
    return -(-problem.taps * channels // block) if flat else problem.taps * -(-channels // block)


def _power_of_two_in(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n
