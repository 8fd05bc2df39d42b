"""Tiles: where they begin, how seams are blended, and errors. tests/parity compares them with diffusers."""

import pytest
import torch

from fastdiff.errors import InputError
from fastdiff.models.tiling import Tiles, blend, tiled


@pytest.mark.parametrize(("height", "width", "needed"), [(64, 64, False), (65, 8, True), (8, 65, True)])
def test_the_size_alone_decides(height, width, needed):
    assert Tiles(64, 512, 0.25).needed(height, width) == needed


@pytest.mark.parametrize("length", [65, 96, 128, 145])
def test_tiles_cover_the_picture(length):
    tiles = Tiles(64, 64, 0.25)
    starts = tiles.starts(length)
    assert list(starts) == list(range(0, length, 48)) and starts[-1] + tiles.side >= length


@pytest.mark.parametrize("size", [(80, 80), (65, 130), (8, 97)], ids=str)
@pytest.mark.parametrize("grown", [1, 2, 8])
def test_what_looks_at_no_neighbour_has_no_seams(size, grown):
    """If the output of a pixel does not depend on other pixels, tiles equal the whole, also where they overlap."""
    x = torch.randn(2, *size, 3)

    def grow(part):
        return part.repeat_interleave(grown, 1).repeat_interleave(grown, 2)

    torch.testing.assert_close(tiled(grow, x, Tiles(64, 64 * grown, 0.25)), grow(x))


def test_a_tile_fades_in_over_the_one_before():
    before, tile = torch.zeros(1, 8, 1, 1), torch.ones(1, 6, 1, 1)
    for dim, (first, second) in {1: (before, tile), 2: (before.transpose(1, 2), tile.transpose(1, 2))}.items():
        assert blend(first, second, 4, dim).flatten().tolist() == [0, 0.25, 0.5, 0.75, 1, 1]
        assert blend(first, second, 0, dim) is second


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (Tiles(1, 8, 0.25), "tile sizes: tiles of 1 cannot overlap by .*; give larger tiles"),
        (Tiles(64, 512, 1.0), "tile sizes: .* cannot overlap"),
        (Tiles(64, 8, 0.25, least=8), "height or width 100: its last tile would be 4 wide; give a multiple of 8"),
    ],
)
def test_what_cannot_be_cut_is_one_line(tiles, message):
    with pytest.raises(InputError, match=f"^{message}"):
        tiles.starts(100)
