"""Enlarged pictures: the fields, the button, and a limit."""

from pathlib import Path

import pytest

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.ui.drawing import Drawn, prepare
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.starting import larger
from tests.ui.history.unserved import upload
from tests.ui.inputs.conftest import ASKED, LIMITS
from tests.ui.inputs.test_mask import mask_file

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_enlarged_picture_is_the_commands_byte_for_byte(picture, command):
    mine = picture(upscale=1.5, upscale_strength=0.6)
    theirs = command("--upscale", "1.5", "--upscale-strength", "0.6")
    assert mine.path.read_bytes() == theirs.read_bytes()
    assert (mine.record["width"], mine.record["height"]) == (96, 72)


def test_the_button_draws_the_same_request_larger(shared, picture, apple):
    drawn = picture(init_image=apple, strength=0.6)
    asked = larger(drawn, shared.catalogue, LIMITS)
    assert (asked.upscale, asked.width, asked.height, asked.num_images) == (1.5, 64, 48, 1)
    assert (asked.seed, asked.steps, asked.prompt, asked.strength) == (5, 5, "a cat", 0.6)
    assert Path(asked.init_image).name == "apple.png"
    assert prepare(asked, shared, LIMITS).size == (96, 72)


@pytest.mark.parametrize("own", [{"upscale": 1.5}, {"mask": True}])
def test_a_picture_that_cannot_be_enlarged_so_becomes_a_start_picture(shared, picture, apple, own):
    own = {"mask": upload(mask_file(), "mouth.png"), "init_image": apple} if "mask" in own else own
    drawn = picture(**own)
    asked = larger(drawn, shared.catalogue, LIMITS)
    assert asked.upscale is asked.mask is None and asked.strength == 0.5
    assert png.read_settings(asked.init_image)["seed"] == drawn.record["seed"]
    width, height = drawn.record["width"] * 3 // 2, drawn.record["height"] * 3 // 2
    assert (asked.width, asked.height) == (width, height)


def test_what_cannot_be_enlarged(shared, picture, apple):
    drawn = picture(init_image=apple, strength=0.6)
    lone = drawn.path.with_name("lone.png")
    lone.write_bytes(png.without_inputs(drawn.path))
    for each, message in (
        (Drawn(drawn.path, drawn.record | {"seed": [1, 2]}), "sheet of pictures; choose one"),
        (Drawn(lone, drawn.record), r"upscale: not restored: the start picture apple\.png"),
    ):
        with pytest.raises(InputError, match=message):
            larger(each, shared.catalogue, LIMITS)


def test_a_picture_beyond_the_limit_is_refused(shared):
    asked = UncheckedRequest(**ASKED, upscale=3)
    with pytest.raises(InputError, match="upscale: the picture would be 192 x 144, and a side may have 150 pixels"):
        prepare(asked, shared, Limits(enlarged=150))


def test_the_button_adds_a_run(unserved_page, models_dir, picture):
    page = unserved_page(models_dir)
    assert "no picture selected" in page.press("DrawTab.upscale")
