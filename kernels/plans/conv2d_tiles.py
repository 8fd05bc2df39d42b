"""The tiles that convolutions are cut into, and the numbers that choose among them.

Times are of one NVIDIA H200 with torch 2.11 and triton 3.6; kernels/README.md has the times of whole convolutions.
"""

from typing import NamedTuple


class ConvTile(NamedTuple):
    """The piece of the output that one program makes, and how; the time that it takes, in microseconds.

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


class Candidate(NamedTuple):
    """The part of a tiling that changes no bit."""

    pixels: int
    channels: int
    block: int
    warps: int
    stages: int
    spread: bool


# Descriptors, 16-bit. The times are fitted to 700 measured convolutions of three U-Nets, batches 1 to 512.
TILES = (
    ConvTile(128, 128, 64, warps=4, stages=3, resident=2, alone=(0.32, 4.8), busy=(0.34, 2.7)),
    ConvTile(256, 128, 64, warps=8, stages=3, resident=1, alone=(0.72, 6.0), busy=(0.72, 6.0)),
    ConvTile(128, 64, 64, warps=4, stages=3, resident=3, alone=(0.21, 4.0), busy=(0.27, 1.2)),
    ConvTile(128, 64, 128, warps=4, stages=4, resident=1, alone=(0.17, 3.8), busy=(0.19, 0.7)),
    ConvTile(64, 64, 64, warps=4, stages=5, resident=2, alone=(0.17, 3.2), busy=(0.14, 1.6)),
    ConvTile(64, 64, 128, warps=4, stages=6, resident=1, alone=(0.075, 3.9), busy=(0.13, 2.5)),
)
WIDE_TILE = ConvTile(256, 64, 64, warps=4, stages=2, resident=2, alone=(0.51, 5.1), busy=(0.47, 3.4))
# Descriptors, fp8. The times were not measured: a step takes half of its time in 16 bits, the rest as long.
FP8_TILES = (
    ConvTile(128, 128, 128, warps=8, stages=4, resident=1, alone=(0.16, 4.8), busy=(0.19, 2.7)),
    ConvTile(128, 64, 128, warps=4, stages=4, resident=2, alone=(0.1, 4.0), busy=(0.13, 1.2)),
    ConvTile(64, 64, 128, warps=4, stages=6, resident=2, alone=(0.08, 3.2), busy=(0.07, 1.6)),
)
SUM_MICROSECONDS = 3.0  # of `sum_chunks`
CHUNK_MICROSECONDS = 0.7  # of a chunk more in a program: its loads start anew
# Up to 16 output channels, the last convolution of a U-Net: the first that fills the card, else the last. These and
# all below were chosen; no measurement of the choices is kept, but for the chunks of float32.
NARROW_TILES = (
    ConvTile(256, 16, 64, warps=4, stages=3, swap=False),
    ConvTile(64, 16, 64, warps=4, stages=4, swap=False),
)
# By pointers, chosen the same way: any channels; less than a block of them, the first convolution of a U-Net; float32.
POINTER_TILES = (ConvTile(128, 64, 32, warps=4, stages=3), ConvTile(64, 64, 32, warps=4, stages=3))
FLAT_TILES = (ConvTile(128, 128, 32, warps=4, stages=2), ConvTile(64, 64, 32, warps=4, stages=2))
FLOAT32_TILES = (
    ConvTile(64, 64, 32, warps=4, stages=2, swap=False),
    ConvTile(32, 32, 32, warps=4, stages=2, swap=False),
)
# Pictures of one row, whole rows in a program: the first that fills the card, else the last. A tile has the pixels of
# several pictures where a row is shorter, of one where it is longer. Chosen by the times of a planner's convolutions at
# batches of 1, 64 and 1024, with norm, Mish, time embedding and residual in them; POINTER_ROW_TILES, for rows and
# channels of other numbers, were not measured.
ROW_TILES = (
    ConvTile(64, 64, 64, warps=4, stages=5, resident=2),
    ConvTile(64, 64, 128, warps=4, stages=4),
    ConvTile(16, 64, 128, warps=4, stages=6),
)
NARROW_ROW_TILES = (
    ConvTile(32, 32, 64, warps=4, stages=5),
    ConvTile(16, 16, 64, warps=1, stages=5),
)  # up to 32 channels
POINTER_ROW_TILES = (ConvTile(64, 64, 64, warps=4, stages=3), ConvTile(16, 32, 64, warps=4, stages=4))
FLAT_ROW_TILES = (ConvTile(32, 32, 32, warps=4, stages=2),)
FLOAT32_ROW_TILES = (
    ConvTile(64, 64, 32, warps=4, stages=3, swap=False),
    ConvTile(16, 32, 32, warps=4, stages=4, swap=False),
    ConvTile(16, 16, 64, warps=4, stages=4, swap=False),
    ConvTile(4, 8, 64, warps=4, stages=5, swap=False),
)
ROW_MEMORY, POINTER_ROW_MEMORY = 192 * 1024, 80 * 1024  # bytes of the tiles that a program loads ahead
LONGEST_ROW = 256  # pixels, up to which a program takes whole rows
WIDEST_GROUP = 64  # channels, up to which a program takes whole groups

M_SIDE = 64  # of a tile, the least of Hopper's own matrix instructions: channels where they are swapped, else pixels
MOST_FILLED = 2048  # pixels that the tiles of a picture alone may take, where only more pictures would fill them
SUM_CHANNELS = 32  # of a program of `sum_chunks`
SMALL_PICTURE = 256  # pixels, up to which k may be cut into chunks
SMALL_MOMENTS = 64  # pixels of a tile of moments of such a picture, at most
LARGEST_NORMALISED = 64  # pixels of a picture, up to which a program takes all and may normalise
CHUNK_STEPS = 30  # of 64 channels each, of a chunk at least
FLOAT32_CHUNK_STEPS = 4  # of 32 channels each: one long float32 sum would be thrice as far off as cuDNN's


def descriptor_tiles(out_channels: int, whole: bool, fp8: bool) -> list[ConvTile]:
    """Return the tiles by descriptors to choose among; `whole`: 128 channels of a step waste none.

    In fp8 a step is added to the float32 sum on its own, so that the steps of all are as long.
    """
    if fp8:
        tiles = [tile._replace(block=128 if whole else 64) for tile in FP8_TILES]
    else:
        tiles = [tile for tile in TILES if tile.block == 64 or whole]
    return [tile for tile in tiles if tile.channels <= max(64, out_channels)]


def row_tiles(out_channels: int, itemsize: int, flat: bool, descriptors: bool) -> tuple[ConvTile, ...]:
    """Return the tiles of rows, the largest first; of fp8 that one alone, whatever the batch, as steps are as long."""
    tiles: tuple[ConvTile, ...]
    if descriptors:
        tiles = NARROW_ROW_TILES if out_channels <= 32 else ROW_TILES
    else:
        tiles = FLOAT32_ROW_TILES if itemsize == 4 else FLAT_ROW_TILES if flat else POINTER_ROW_TILES
    return tiles[:1] if itemsize == 1 else tiles
