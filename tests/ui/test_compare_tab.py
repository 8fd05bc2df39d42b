"""A comparison: one seed for both, and the difference between two pictures."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff.requests import png
from fastdiff.ui.compare_tab import comparison_table, difference


@pytest.fixture
def picture(tmp_path):
    def save(name: str, value: int, size: tuple[int, int] = (4, 4)):
        path = tmp_path / f"{name}.png"
        Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path)
        return path

    return save


def test_equal_pictures(picture):
    assert difference(picture("a", 7), picture("b", 7)) == "none: the pictures are identical"


def test_levels_do_not_wrap(picture):
    # PSNR = 20 log10(255 / 255) = 0
    assert difference(picture("a", 0), picture("b", 255)) == "255.0 of 255 on average, 255 at most, PSNR 0.0 dB"


def test_one_pixel(picture):
    path = picture("b", 0)
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[0, 0] = 16  # mean 1, mean square 16
    Image.fromarray(pixels).save(path)
    assert difference(picture("a", 0), path) == "1.0 of 255 on average, 16 at most, PSNR 36.1 dB"


def test_other_sizes(picture):
    assert difference(picture("a", 0), picture("b", 0, (8, 4))) == "the pictures have different sizes"


def test_table_is_escaped():
    assert "<b>" not in comparison_table([1.0, 2.0], "<b>")


def test_both_sides_have_the_same_random_seed(visit):
    page = visit()
    event = page.event("compare", "click")
    page.call(event, page.inputs(event, Seed=-1, Steps=1))
    deadline, shown = time.monotonic() + 60, ""
    while "Pixel difference" not in shown:
        assert time.monotonic() < deadline, shown
        shown += page.look()
    seeds = {png.read_settings(Path(path))["seed"] for path in re.findall(r"'path': '([^']+\.png)'", shown)}
    assert len(seeds) == 1 and seeds != {-1}
    assert "identical" in shown


@pytest.mark.parametrize("event", ["CompareTab._follow.<locals>.follow", "DrawTab.follow_model"])
def test_a_model_can_be_picked_while_the_fields_hold_choices_of_the_model_before(unserved_page, event):
    """Gradio sends two events for a pick, and the second may leave the page before the answer to the first comes."""
    page = unserved_page()
    said = page.press(event, {"Model": "emoji-sd", "Size": "128x96", "Style": "gone", "Label": "gone"})
    assert "emoji-sd" in said or "128x128" in said
    assert "alert" not in said
