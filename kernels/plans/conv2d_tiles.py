"""The tiles of convolutions, and the numbers that choose among them.

Times were measured on one NVIDIA H200 with torch 2.11 and triton 3.6. docs/measurements/kernels.md has the times
of whole convolutions.
"""

from typing import NamedTuple

import torch

from fastdiff.kernels.host.launching import has_descriptors, stages_for_two


class ConvTile(NamedTuple):
    """The part of the output that one program computes, its launch options, and its time in microseconds.

    A program that is alone on its multiprocessor waits for its loads; several programs wait for each other's products.
    """

    pixels: int
    channels: int
    block: int  # input channels per step
    warps: int
    stages: int
    swap: bool = True  # channels on the M side of the matrix unit
    resident: int = 1  # programs per multiprocessor
    alone: tuple[float, float] = (0.0, 0.0)  # time of 64 channels of a step, and of the rest, for a lone program
    busy: tuple[float, float] = (0.0, 0.0)  # the same for each program on a full multiprocessor

    @property
    def holds_two_sums(self) -> bool:
        """Whether a program's registers hold the sum of a chunk beside the sum of the chunks before it."""
        return self.pixels * self.channels <= 2048 * self.warps

    def on(self, device: torch.device, itemsize: int, *, flat: bool, groups: int) -> "ConvTile":
        """Return the tile with the warps and stages for the registers and shared memory of a card.

        On a card without descriptors, 4 warps of some tiles would spill 300 to 1,500 bytes per thread (Triton 3.9), and
        8 warps at most 200: if a step has an address for each number (`flat`), and if the norm in the epilogue sums
        many pictures' wide groups. groups: pictures of a tile x channels of a group.
        """
        step = (self.pixels + self.channels) * self.block * itemsize
        tile = self._replace(stages=stages_for_two(self.stages, step, 0, device))
        spills = self.pixels * self.channels > 64 * 128 if flat else groups > 256
        return tile._replace(warps=8) if spills and not has_descriptors(device) else tile


class Candidate(NamedTuple):
    """The part of a tiling that does not affect any bit of the result."""

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
# For sums in chunks, each from its own program. Small tiles pass few numbers on to the program that arrives last. The
# times are fitted to convolutions of 256 and 512 channels.
ARRIVAL_TILES = (
    ConvTile(16, 64, 128, warps=4, stages=4, resident=2, alone=(0.07, 3.4), busy=(0.04, 2.6)),
    ConvTile(64, 16, 128, warps=4, stages=4, swap=False, resident=2, alone=(0.07, 4.5), busy=(0.04, 3.0)),
    ConvTile(64, 32, 128, warps=4, stages=4, swap=False, resident=2, alone=(0.07, 4.0), busy=(0.04, 2.2)),
)
# For the same sums, all chunks in one program.
CHUNK_TILE = ConvTile(128, 128, 64, warps=8, stages=4, resident=1, alone=(0.34, 4.5), busy=(0.34, 4.5))
WIDE_TILE = ConvTile(256, 64, 64, warps=4, stages=2, resident=2, alone=(0.51, 5.1), busy=(0.47, 3.4))
# Descriptors, fp8. The times were not measured: they assume half of the 16-bit time for a step, and the same for the
# rest.
FP8_TILES = (
    ConvTile(128, 128, 128, warps=8, stages=4, resident=1, alone=(0.16, 4.8), busy=(0.19, 2.7)),
    ConvTile(128, 64, 128, warps=4, stages=4, resident=2, alone=(0.1, 4.0), busy=(0.13, 1.2)),
    ConvTile(64, 64, 128, warps=4, stages=6, resident=2, alone=(0.08, 3.2), busy=(0.07, 1.6)),
)
SUM_MICROSECONDS = 3.0  # of `sum_chunks`
ARRIVAL_MICROSECONDS = 0.2, 0.00017  # of the program that arrives last: at least, and for each number that it adds
CHUNK_MICROSECONDS = {True: 0.26, False: 0.7}  # of each further chunk in a program; whether it holds two sums
# Up to 16 output channels, as in the last convolution of a U-Net: the first tile that fills the card, otherwise the
# last. No measurement is kept for these tiles and all numbers below, except for the chunks in float32.
NARROW_TILES = (
    ConvTile(256, 16, 64, warps=4, stages=3, swap=False),
    ConvTile(64, 16, 64, warps=4, stages=4, swap=False),
)
# By pointers, selected in the same way. POINTER_TILES: any number of channels. FLAT_TILES: fewer channels than a block,
# as in the first convolution of a U-Net.
POINTER_TILES = (ConvTile(128, 64, 32, warps=4, stages=3), ConvTile(64, 64, 32, warps=4, stages=3))
FLAT_TILES = (ConvTile(128, 128, 32, warps=4, stages=2), ConvTile(64, 64, 32, warps=4, stages=2))
FLOAT32_TILES = (
    ConvTile(64, 64, 32, warps=4, stages=2, swap=False),
    ConvTile(32, 32, 32, warps=4, stages=2, swap=False),
)
# Pictures of one row, whole rows per program: the first tile that fills the card, otherwise the last. A tile covers
# several pictures if a row is shorter than the tile, and one picture if it is longer. Chosen by the times of a
# planner's convolutions at batches of 1, 64 and 1024, fused with norm, Mish, time embedding and residual.
# POINTER_ROW_TILES, for other numbers of pixels and channels, were not measured.
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
ROW_MEMORY, POINTER_ROW_MEMORY = 192 * 1024, 80 * 1024  # bytes of the tiles that a program prefetches
LONGEST_ROW = 256  # most pixels in a row that a program computes whole
WIDEST_GROUP = 64  # most channels in a group that a program computes whole

SUM_CHANNELS = 32  # per program of `sum_chunks`
M_SIDE = 64  # least M of Hopper's own matrix instructions: a tile's channels if swapped, otherwise its pixels
MOST_FILLED = 2048  # most pixels in the tiles of one picture, if they are full only with further pictures
SMALL_PICTURE = 256  # most pixels in a picture for which k may be cut into chunks
SMALL_MOMENTS = 64  # most pixels in a moments tile of such a picture
LARGEST_NORMALISED = 64  # most pixels in a picture that a program computes whole and may normalise
# Other small pictures: up to that many pixels, k is cut if its sum over all inputs has at least that many steps of 64
# channels. Each input has up to MOST_CHUNKS chunks of at least FEWEST_STEPS steps.
CHUNKED = ((16, 24), (64, 72))
MOST_CHUNKS, FEWEST_STEPS = 6, 12
CHUNK_STEPS = 30  # fewest steps in a chunk, of 64 channels each
FLOAT32_CHUNK_STEPS = 4  # of 32 channels each: the error of one long float32 sum would be three times cuDNN's


def descriptor_tiles(out_channels: int, whole: bool, fp8: bool) -> list[ConvTile]:
    """Return the tiles to choose among when descriptors load.

    In fp8 each step is added to the float32 sum on its own, so all tiles have steps of the same length.

    Args:
        whole: whether steps of 128 channels waste none.
    """
    if fp8:
        tiles = [tile._replace(block=128 if whole else 64) for tile in FP8_TILES]
    else:
        tiles = [tile for tile in TILES if tile.block == 64 or whole]
    return [tile for tile in tiles if tile.channels <= max(64, out_channels)]


def row_tiles(out_channels: int, itemsize: int, flat: bool, descriptors: bool) -> tuple[ConvTile, ...]:
    """Return the tiles for pictures of one row, the largest first.

    In fp8, return only the largest, so that steps have the same length at every batch.
    """
    tiles: tuple[ConvTile, ...]
    if descriptors:
        tiles = NARROW_ROW_TILES if out_channels <= 32 else ROW_TILES
    else:
        tiles = FLOAT32_ROW_TILES if itemsize == 4 else FLAT_ROW_TILES if flat else POINTER_ROW_TILES
    return tiles[:1] if itemsize == 1 else tiles
