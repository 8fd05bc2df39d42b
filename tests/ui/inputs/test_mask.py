"""Masks: what the editor sends becomes a mask, and a mask comes back into the editor unchanged."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.ui.drawing import draw, prepare, write_grid
from fastdiff.ui.gallery import _change
from fastdiff.ui.inputs.mask import mask_at
from fastdiff.ui.parts.request import UncheckedRequest
from fastdiff.ui.starting import MOST, SIDE, editor_value
from tests.ui.history.unserved import upload
from tests.ui.inputs.conftest import ASKED, LIMITS, png_file

pytestmark = pytest.mark.usefixtures("one_thread")


def mask_file(box: tuple[int, int, int, int] = (0, 0, 32, 48)) -> bytes:
    image = Image.new("L", (64, 48))
    image.paste(255, box)
    return saved(image)


def saved(image: Image.Image, form: str = "png", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def pixels(path: Path | str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def painted(data: bytes) -> str:
    """Return what the editor sends for a mask."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


BLACK = painted(saved(Image.new("L", (8, 8))))


def test_strokes_are_the_mask(upload_folder):
    path = mask_at(painted(mask_file()), LIMITS.uploads)
    assert (path.name, path.read_bytes()) == ("mask.png", mask_file())
    given = upload(mask_file(), "mouth.png")
    assert mask_at(given, LIMITS.uploads) == mask_at(given["path"], LIMITS.uploads) == Path(given["path"])


@pytest.mark.parametrize("mode", ["LAB", "P"])
def test_strokes_are_seen_in_any_mode(upload_folder, recwarn, mode):
    white, black = (
        Image.merge("LAB", [Image.new("L", (8, 8), level), *[Image.new("L", (8, 8), 128)] * 2])
        if mode == "LAB"
        else Image.new("L", (8, 8), level).convert("P")
        for level in (255, 0)
    )
    form = {"LAB": {"form": "tiff"}, "P": {"transparency": bytes(256)}}[mode]
    assert mask_at(painted(saved(white, **form)), LIMITS.uploads).is_file()
    with pytest.raises(InputError, match="nothing is painted"):
        mask_at(painted(saved(black, **form)), LIMITS.uploads)
    assert not recwarn


@pytest.mark.parametrize(
    "value",
    [
        *(None, "", [], {}, 7, "x", "/etc/passwd", "\0"),
        *("data:image/png;base64,?", "data:image/gif;base64,AAAA"),
        *(painted(b""), painted(b"no picture"), painted(mask_file())[:-40]),
        BLACK,
    ],
)
def test_what_is_no_mask_is_one_line(upload_folder, value):
    with pytest.raises(InputError, match=r"^mask") as refusal:
        mask_at(value, LIMITS.uploads)
    assert "\n" not in str(refusal.value) and str(upload_folder) not in str(refusal.value)
    assert ("nothing is painted" in str(refusal.value)) is (value in (None, "", BLACK))


@pytest.mark.parametrize(("size", "longest"), [((64, 48), SIDE), ((700, 300), 700), ((3000, 1000), MOST)])
def test_the_editor_shows_small_pictures_larger_and_large_ones_smaller(upload_folder, size, longest):
    start = Path(upload(png_file(size), "a.png")["path"])
    html = editor_value(start)
    height = round(size[1] * longest / size[0])
    assert f'<canvas width="{longest}" height="{height}"' in html and 'class="old"' not in html
    assert 'class="old"' in editor_value(start, Path(upload(mask_file(), "mouth.png")["path"]))


def test_inpainting_is_the_commands_byte_for_byte(picture, command, apple):
    own = {"strength": 1.0, "mask_blur": 2.0}
    mine = picture(init_image=apple, mask=upload(mask_file(), "mouth.png"), **own)
    flags = ["--init-image", "apple.png", "--mask", "mouth.png", "--mask-blur", "2", "--embed-inputs"]
    theirs = command(*flags, files={"mouth.png": mask_file()})
    assert mine.path.read_bytes() == theirs.read_bytes()
    assert mine.record["mask"] == "mouth.png" and png.read_input(mine.path, "mask") == mask_file()
    other = picture(init_image=apple, mask=upload(mask_file((0, 0, 64, 8)), "mouth.png"), **own)
    assert other.path.read_bytes() != mine.path.read_bytes()


def test_a_grid_holds_the_mask_after_the_uploads_are_gone(shared, apple, tmp_path):
    mask = upload(mask_file(), "mouth.png")
    asked = UncheckedRequest(**ASKED | {"num_images": 2}, init_image=apple, mask=mask)
    run = prepare(asked, shared, LIMITS)
    drawn = [each for _, some in draw(run, shared, tmp_path / "run") for each in some]
    for each in (apple, mask):
        Path(each["path"]).unlink()
    grid = write_grid(run, drawn)
    assert png.read_input(grid, "mask") == mask_file() and png.read_input(grid, "init-image") == png_file()


def test_the_editor_opens_over_the_start_picture(page, picture, apple):
    on = {"Start picture": apple, "Paint a mask": True, "Model": "./text/sd1", "Strength": 0.8}
    said = page.press("Starting.paint", on)
    assert "<canvas" in said and "Starts from apple.png. Paint what" in said and "1.0," in said
    said = page.press("Starting.paint", on | {"Strength": 0.6})
    assert "0.6" in said
    said = page.press("Starting.paint", on | {"Paint a mask": False, "Strength": 1.0})
    assert "<canvas" not in said and "0.8" in said
    sdxl = on | {"Model": "./text/sdxl", "Guidance": 5.0}
    assert "7.5" in page.press("Starting.paint", sdxl)
    assert "7.5" not in page.press("Starting.paint", sdxl | {"Guidance": 6.0})
    back = {"Paint a mask": False, "Strength": 0.9999, "Guidance": 7.5}
    assert "5.0" in page.press("Starting.paint", sdxl | back)
    said = page.press("Starting.paint", on | {"Start picture": None})
    assert "Start picture: drop a PNG" in said


def test_the_settings_of_a_picture_bring_its_mask_back(page, picture, apple):
    drawn = picture(init_image=apple, mask=upload(mask_file(), "mouth.png"), mask_blur=3)
    page.choose("DrawTab.use", drawn)
    said = page.press("DrawTab.use")
    assert "mouth.png" in said and "<canvas" in said and "not restored" not in said
    assert '"value":3' in said


def test_the_panel_compares_an_inpainted_picture_with_its_start(picture, apple):
    shown = _change(picture(init_image=apple, mask=upload(mask_file(), "mouth.png")))
    assert shown["visible"] is True and len(shown["value"]) == 2
