"""The contact sheet: its shape, its size limit, and the place of each picture."""

import pytest
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.runs import sheet


@pytest.mark.parametrize(
    ("num_labels", "num_seeds", "columns"),
    [(3, 5, 5), (1, 4, 2), (4, 1, 2), (0, 4, 2), (1, 5, 3), (1, 1, 1), (36, 1, 6)],
)
def test_a_grid_has_a_row_per_label_or_is_near_square(num_labels, num_seeds, columns):
    assert sheet.grid_columns(num_labels, num_seeds) == columns


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_each_picture_has_its_place_on_the_sheet(mode):
    shades = [40, 80, 120, 160, 200]
    contact = sheet.ContactSheet(count=5, columns=3)
    for index, shade in enumerate(shades):
        contact.paste(index, Image.new("L", (8, 4), shade).convert(mode))
    assert contact.image.mode == mode
    assert contact.image.size == sheet.sheet_size(5, 3, (8, 4)) == (3 * 8 + 4 * 2, 2 * 4 + 3 * 2)
    image = contact.image.convert("L")
    places = [(2 + 10 * (i % 3), 2 + 6 * (i // 3)) for i in range(5)]
    assert [image.getpixel(place) for place in places] == shades
    assert [image.getpixel((x + 7, y + 3)) for x, y in places] == shades
    assert image.getpixel((2 + 20, 2 + 6)) == image.getpixel((0, 0)) == 255


def test_a_sheet_that_nobody_could_open_is_refused():
    with pytest.raises(InputError, match=r"a grid of 50000 pictures would be .* leave out --grid"):
        sheet.sheet_size(50_000, 224, (256, 256))
