"""Drawing from a start picture: the command's bytes, and a PNG that brings everything back."""

from pathlib import Path

import pytest

from fastdiff.requests import png
from fastdiff.ui.drawing import draw, prepare, write_grid
from fastdiff.ui.inputs.axes import Axes, Axis
from fastdiff.ui.parts.request import UncheckedRequest
from fastdiff.ui.sheet import draw_sheet, prepare_sheet
from tests.ui.history.unserved import upload
from tests.ui.inputs.conftest import ASKED, LIMITS, png_file

pytestmark = pytest.mark.usefixtures("one_thread")
AXES = Axes(Axis("seed", (1, 2)), None)


def test_image_to_image_is_the_commands_byte_for_byte(picture, command, apple):
    mine = picture(init_image=apple, strength=0.6).path.read_bytes()
    theirs = command("--init-image", "apple.png", "--strength", "0.6", "--embed-inputs")
    assert mine == theirs.read_bytes()
    assert mine != picture(init_image=apple, strength=0.4).path.read_bytes()
    assert mine != picture(init_image=upload(png_file(seed=1), "apple.png"), strength=0.6).path.read_bytes()


def test_a_weighted_prompt_with_an_interval_is_the_commands_byte_for_byte(picture, command):
    prompt = "a (cat:1.4) on a [mat|hat]"
    own = {"prompt_syntax": "weighted", "emphasis": "no-norm", "guidance_start": 0.2, "guidance_stop": 0.8}
    mine = picture(prompt=prompt, guidance_scale=4.0, **own).path.read_bytes()
    flags = [
        "--prompt-syntax",
        "weighted",
        "--emphasis",
        "no-norm",
        "--guidance-start",
        "0.2",
        "--guidance-stop",
        "0.8",
    ]
    assert mine == command("--cfg-scale", "4", *flags, prompt=prompt).read_bytes()


def test_fields_at_their_defaults_change_no_bytes(picture):
    own = {"prompt_syntax": "plain", "guidance_start": 0, "guidance_stop": 1}
    assert picture(**own).path.read_bytes() == picture().path.read_bytes()


def test_the_command_repeats_a_png_of_the_page(picture, command, apple):
    drawn = picture(init_image=apple, strength=0.6)
    Path(apple["path"]).unlink()  # the PNG holds its bytes
    again = command("--from", str(drawn.path), "--embed-inputs")
    assert again.read_bytes() == drawn.path.read_bytes()


def test_grids_and_sheets_hold_the_start_picture(shared, apple, tmp_path):
    asked = UncheckedRequest(**ASKED | {"num_images": 2}, init_image=apple, strength=0.4)
    run = prepare(asked, shared, LIMITS)
    drawn = [each for _, some in draw(run, shared, tmp_path / "run") for each in some]
    Path(apple["path"]).unlink()
    grid = write_grid(run, drawn)
    assert png.read_input(grid, "init-image") == png_file()
    assert png.read_settings(grid)["init_image"] == "apple.png"
    sheet = prepare_sheet(UncheckedRequest(**ASKED, init_image=upload(png_file(), "apple.png")), AXES, shared, LIMITS)
    cells = [each for _, some in draw_sheet(sheet, shared, tmp_path / "sheet") for each in some]
    assert png.read_input(cells[-1].path, "init-image") == png_file()
