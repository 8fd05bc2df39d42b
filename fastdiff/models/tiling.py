"""Overlapping tiles, computed one by one with blended seams: for pictures that are too large for a GPU's memory."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff.errors import InputError


class Tiles(NamedTuple):
    """How a picture is cut into tiles, as in diffusers' AutoencoderKL."""

    side: int  # of an input tile, in pixels of the input
    out_side: int  # of an output tile, in pixels of the output
    overlap: float  # the share of a tile that the next one covers too
    least: int = 1  # the smallest side of an input tile

    def needed(self, height: int, width: int) -> bool:
        """Return whether an input is larger than a tile."""
        return max(height, width) > self.side

    def starts(self, length: int) -> range:
        """Return where the tiles along a side of the input begin. Raises InputError if it cannot be cut into tiles."""
        step = int(self.side * (1 - self.overlap))
        if not 0 <= self.overlap < 1 or step < 1:
            raise InputError(
                f"tile sizes: tiles of {self.side} cannot overlap by {self.overlap}; give larger tiles or less overlap"
            )
        starts = range(0, length, step)
        if length - starts[-1] < self.least:
            raise InputError(
                f"height or width {length}: its last tile would be {length - starts[-1]} wide; "
                f"give a multiple of {self.least}"
            )
        return starts

    @property
    def blended(self) -> int:
        """The rows or columns of the output that neighbouring tiles share."""
        return int(self.out_side * self.overlap)


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, tiles: Tiles) -> Tensor:
    """Apply `function` to x (N, H, W, C) tile by tile, as in diffusers' tiled_decode and tiled_encode."""
    rows, columns = tiles.starts(x.shape[1]), tiles.starts(x.shape[2])
    kept = tiles.out_side - tiles.blended
    above: list[Tensor] = []
    result = []
    for top in rows:
        row: list[Tensor] = []
        for j, left in enumerate(columns):
            tile = function(x[:, top : top + tiles.side, left : left + tiles.side])
            if above:
                tile = blend(above[j], tile, tiles.blended, dim=1)
            if row:
                tile = blend(row[-1], tile, tiles.blended, dim=2)
            row.append(tile)
        result.append(torch.cat([tile[:, :kept, :kept] for tile in row], dim=2))
        above = row
    return torch.cat(result, dim=1)


def blend(before: Tensor, tile: Tensor, extent: int, dim: int) -> Tensor:
    """Return the tile, its first `extent` rows (dim 1) or columns (dim 2) blended with the last ones of `before`."""
    extent = min(before.shape[dim], tile.shape[dim], extent)
    if not extent:
        return tile
    ramp = torch.arange(extent, dtype=torch.float64, device=tile.device) / extent
    ramp = ramp.to(tile.dtype).view(-1, *[1] * (tile.ndim - 1 - dim))
    last = before.narrow(dim, before.shape[dim] - extent, extent)
    faded = last * (1 - ramp) + tile.narrow(dim, 0, extent) * ramp
    return torch.cat([faded, tile.narrow(dim, extent, tile.shape[dim] - extent)], dim)
