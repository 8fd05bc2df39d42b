"""Masks: what the editor sends becomes a mask, and a mask comes back into the editor unchanged."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.ui.drawing import draw, prepare, write_grid
from fastdiff.ui.gallery import _change
from fastdiff.ui.inputs.mask import painted
from fastdiff.ui.parts.request import UncheckedRequest
from fastdiff.ui.starting import MOST, SIDE, editor_value
from tests.ui.history.unserved import UnservedPage, upload
from tests.ui.inputs.conftest import ASKED, LIMITS, png_file

pytestmark = pytest.mark.usefixtures("one_thread")


def layer(box: tuple[int, int, int, int] | None, size: tuple[int, int] = (64, 48)) -> bytes:
    """Return a layer of the editor, with white strokes in a box."""
    image = Image.new("RGBA", size)
    if box:
        image.paste("white", box)
    return saved(image)


def mask_file(box: tuple[int, int, int, int] = (0, 0, 32, 48)) -> bytes:
    image = Image.new("L", (64, 48))
    image.paste(255, box)
    return saved(image)


def saved(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="png")
    return buffer.getvalue()


def pixels(path: Path | str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_strokes_are_white(upload_folder):
    value = {"background": None, "layers": [upload(layer((8, 8, 16, 24)), "layer_0.png")], "composite": None}
    path = painted(value, LIMITS.uploads)
    expected = np.zeros((48, 64), np.uint8)
    expected[8:24, 8:16] = 255
    assert np.array_equal(pixels(path), expected) and path.name == "mask.png"


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        "x",
        {"layers": None},
        {"layers": []},
        {"layers": ["/etc/passwd"]},
        {"layers": [7]},
        {"layers": [layer(None)]},
        {"layers": [b"no picture"]},
        {"layers": [layer((0, 0, 9, 9)), layer((0, 0, 9, 9), (32, 32))]},
    ],
)
def test_what_is_no_mask_is_one_line(upload_folder, value):
    if isinstance(value, dict) and value.get("layers"):
        files = [
            upload(each, f"{i}.png") if isinstance(each, bytes) else each for i, each in enumerate(value["layers"])
        ]
        value = {"layers": files}
    with pytest.raises(InputError, match=r"^mask") as refusal:
        painted(value, LIMITS.uploads)
    assert "\n" not in str(refusal.value) and str(upload_folder) not in str(refusal.value)


@pytest.mark.parametrize(("size", "longest"), [((64, 48), SIDE), ((700, 300), 700), ((3000, 1000), MOST)])
def test_the_editor_shows_small_pictures_larger_and_large_ones_smaller(upload_folder, size, longest):
    start = Path(upload(png_file(size), "a.png")["path"])
    value = editor_value(start, None, LIMITS)
    assert value["layers"] == [] and max(pixels(value["background"]).shape) == longest


def test_a_mask_comes_back_unchanged_until_it_is_painted_over(upload_folder):
    start, mask = (Path(upload(*each)["path"]) for each in ((png_file(), "a.png"), (mask_file(), "mouth.png")))
    value = editor_value(start, mask, LIMITS)
    (shown,) = value["layers"]
    assert pixels(shown).shape == (384, 512, 4) and pixels(shown)[10, 10, 3] == 255 and pixels(shown)[10, 500, 3] == 0
    again = painted(value, LIMITS.uploads)
    assert (again.name, again.read_bytes()) == ("mouth.png", mask_file())
    restroked = saved(Image.open(shown))  # the browser writes another file
    new = painted({"layers": [upload(restroked, "layer_0.png")]}, LIMITS.uploads)
    assert new.name == "mask.png" and pixels(new).shape == (384, 512)


def test_a_grid_holds_the_mask_after_the_uploads_are_gone(engine, apple, tmp_path):
    mask = upload(mask_file(), "mouth.png")
    asked = UncheckedRequest(**ASKED | {"num_images": 2}, init_image=apple, mask=mask)
    run = prepare(asked, engine, LIMITS)
    drawn = [each for _, some in draw(run, engine, tmp_path / "run") for each in some]
    for each in (apple, mask):
        Path(each["path"]).unlink()
    grid = write_grid(run, drawn)
    assert png.read_input(grid, "mask") == mask_file() and png.read_input(grid, "init-image") == png_file()


@pytest.fixture
def page(tmp_path, models_dir, upload_folder) -> UnservedPage:
    return UnservedPage(tmp_path / "outputs", models_dir)


def test_the_editor_opens_over_the_start_picture(page, picture, apple):
    on = {"Start picture": apple, "Paint a mask": True, "Model": "./text/sd1", "Strength": 0.8}
    said = page.press("Starting.paint", on)
    assert "background.png" in said and "Starts from apple.png. Paint what" in said and "1.0," in said
    said = page.press("Starting.paint", on | {"Strength": 0.6})
    assert "0.6" in said
    said = page.press("Starting.paint", on | {"Paint a mask": False, "Strength": 1.0})
    assert "background.png" not in said and "0.8" in said
    said = page.press("Starting.paint", on | {"Start picture": None})
    assert "Start picture: drop a PNG" in said


def test_the_settings_of_a_picture_bring_its_mask_back(page, picture, apple):
    drawn = picture(init_image=apple, mask=upload(mask_file(), "mouth.png"), mask_blur=3)
    page.choose("DrawTab.use", drawn)
    said = page.press("DrawTab.use")
    assert "mouth.png" in said and "background.png" in said and "not restored" not in said
    assert '"value":3' in said


def test_the_panel_compares_an_inpainted_picture_with_its_start(picture, apple):
    shown = _change(picture(init_image=apple, mask=upload(mask_file(), "mouth.png")))
    assert shown["visible"] is True and len(shown["value"]) == 2
