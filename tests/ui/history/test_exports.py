"""Several pictures as a ZIP or a grid."""

import zipfile

import pytest
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.ui.history import exports

COLOURS = ("red", "lime", "blue")


@pytest.fixture
def pictures(tmp_path):
    """Three pictures on a shelf; the second is smaller."""
    paths = []
    for colour, side in zip(COLOURS, (8, 4, 8), strict=True):
        paths.append(tmp_path / "shelf/2026-01-02/run" / f"{colour}.png")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side), colour).save(paths[-1])
    return paths


def test_a_zip_has_the_files_under_their_names_on_the_shelf(pictures, tmp_path):
    path = exports.write_zip(tmp_path, tmp_path / "shelf", pictures, 2**20)
    with zipfile.ZipFile(path) as file:
        assert file.namelist() == [f"2026-01-02/run/{colour}.png" for colour in COLOURS]
        assert [file.read(name) for name in file.namelist()] == [each.read_bytes() for each in pictures]


def test_a_zip_has_a_largest_size(pictures, tmp_path):
    with pytest.raises(InputError, match="more than 0 MiB; select fewer"):
        exports.write_zip(tmp_path, tmp_path / "shelf", pictures, 100)
    assert not (tmp_path / "pictures.zip").exists()


def test_a_grid_has_a_cell_of_the_largest_size_for_each_picture(pictures, tmp_path):
    with Image.open(exports.write_grid(tmp_path, pictures)) as grid:
        assert grid.size == (2 * 8 + 3 * 2, 2 * 8 + 3 * 2)
        centres = [grid.getpixel(at) for at in ((6, 6), (16, 6), (6, 16), (16, 16))]
        assert centres == [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
        assert grid.getpixel((13, 3)) == (255, 255, 255)  # beside the smaller picture


def test_a_grid_has_a_largest_size(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "MOST_PIXELS", 3 * 64 - 1)
    with pytest.raises(InputError, match="a grid of 3 pictures of this size is too large; select fewer"):
        exports.write_grid(tmp_path, pictures)


@pytest.mark.parametrize(
    "write", [lambda *args: exports.write_zip(*args, 2**20), lambda to, _, paths: exports.write_grid(to, paths)]
)
def test_a_picture_that_is_gone(pictures, tmp_path, write):
    pictures[1].unlink()
    with pytest.raises(InputError, match="a picture was deleted; select the pictures again"):
        write(tmp_path, tmp_path / "shelf", pictures)
    assert not (tmp_path / "pictures.zip").exists()
