"""Start pictures in Chromium: drop one, paint a mask, compare, enlarge, and bring it all back."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff.hosting.models import Models
from fastdiff.requests import png
from fastdiff.ui.shared import Shared
from tests.ui.browser.actions import (
    DESKTOP,
    PHONE,
    combobox,
    drop,
    expect,
    fill,
    generate,
    number,
    open_tab,
    pick,
    screenshot,
    settings,
    until,
    wait_for_end,
    wait_for_status,
)
from tests.ui.browser.test_accessible import are_in_order, problems, wait_for_fields, walk
from tests.ui.inputs.conftest import png_file

pytestmark = pytest.mark.slow
SD1, FIELD = "./text/sd1", "#start-picture button"
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
HAS_NO_SIDE_SCROLL = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def shared(models_dir) -> Shared:
    return Shared(Models(models_dir, device="cpu"))


@pytest.fixture
def open_sd1(open_page):
    """Return a function that opens the page with a model that reads text."""

    def open_one(size=DESKTOP):
        page = open_page(size)
        pick(page, "Model", SD1)
        wait_for_status(page, f"Ready to draw with {SD1}")
        return page

    return open_one


def open_start(page) -> None:
    page.locator("#start button.label-wrap").click()
    number(page, "Strength").wait_for()


def download(page, to: Path) -> Path:
    with page.expect_download() as file:
        page.get_by_role("button", name="Download this picture").locator("visible=true").click()
    return Path(shutil.copy(file.value.path(), to))


def stroke(page) -> None:
    """Paint from left to right over the middle of the mask."""
    canvas = page.locator("#mask canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.35 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.65 * box["width"], middle, steps=5)
    page.mouse.up()
    page.wait_for_function("Boolean(window.painted)")


def test_the_first_screen_of_a_phone_has_the_prompt_and_the_button(open_sd1):
    page = open_sd1(PHONE)
    page.evaluate("scrollTo(0, 0)")
    for shown in (page.get_by_role("textbox", name="Prompt", exact=True), page.get_by_role("button", name="Generate")):
        expect(shown).to_be_in_viewport(ratio=1)
    expect(number(page, "Strength")).to_have_count(0)


@SIZES
def test_a_dropped_picture_is_changed_and_comes_back(open_sd1, size, tmp_path):
    page = open_sd1(size)
    open_start(page)
    drop(page, png_file(), "apple.png", onto=FIELD)
    wait_for_status(page, "Starts from apple.png")
    fill(page, {number(page, "Strength"): "0.4"})
    names = [name.splitlines()[0].strip("▼◀ ") for name in walk(page, "Draw")]
    assert are_in_order(names, "Seed", "Start picture", "number input for Strength", "More settings", "Generate")
    screenshot(page, f"start-{size['width']}", tmp_path, full_page=True)
    assert page.evaluate(HAS_NO_SIDE_SCROLL)
    page.reload()
    expect(number(page, "Strength")).to_have_value("0.4")
    generate(page, steps=5, seed=5)
    wait_for_status(page, "Drew 1 picture")
    wait_for_end(page)
    expect(settings(page)).to_contain_text("apple.png")
    expect(page.locator(".change").locator("visible=true").get_by_test_id("imageslider-image")).to_have_count(2)
    first = download(page, tmp_path / "first.png")
    assert png.read_input(first, "init-image") == png_file()
    assert {"init_image": "apple.png", "strength": 0.4, "width": 64, "height": 48}.items() <= png.read_settings(
        first
    ).items()

    again = open_sd1(size)
    drop(again, first.read_bytes(), "first.png")
    wait_for_status(again, "Loaded the settings of first.png")
    expect(number(again, "Strength")).to_have_value("0.4")
    again.get_by_role("button", name="Generate").click()
    wait_for_status(again, "Drew 1 picture")
    wait_for_end(again)
    assert download(again, tmp_path / "second.png").read_bytes() == first.read_bytes()


@SIZES
def test_a_mask_is_painted_over_a_picture_of_history(open_sd1, size, tmp_path):
    page = open_sd1(size)
    generate(page, steps=5, seed=5)
    wait_for_status(page, "Drew 1 picture")
    wait_for_end(page)
    open_tab(page, "History")
    page.locator("#history .thumbnail-lg").first.click()
    page.get_by_role("button", name="Paint a mask").locator("visible=true").click()
    wait_for_status(page, "Paint what should change")
    page.locator("#mask canvas").first.wait_for()
    expect(page.get_by_label("Paint a mask").locator("visible=true")).to_be_checked()
    expect(number(page, "Strength")).to_have_value("1")
    stroke(page)
    walked = [name.splitlines()[0] for name in walk(page, "Draw")]
    assert are_in_order(
        walked[: walked.index("Generate")],
        "number input for Strength",
        "Paint a mask",
        "Brush size",
        "Erase",
        "Undo",
        "Clear",
    )
    page.get_by_role("button", name="Clear", exact=True).click()
    generate(page, seed=6)
    page.locator(".actions .problem").get_by_text("nothing is painted").locator("visible=true").wait_for()
    page.get_by_role("button", name="Undo", exact=True).click()
    screenshot(page, f"mask-{size['width']}", tmp_path, full_page=True)
    assert page.evaluate(HAS_NO_SIDE_SCROLL)
    page.get_by_role("button", name="Generate").click()
    expect(settings(page)).to_contain_text("mask.png")
    wait_for_end(page)
    first = download(page, tmp_path / "first.png")
    with Image.open(io.BytesIO(png.read_input(first, "mask"))) as mask:
        white = np.asarray(mask.convert("L")) >= 128
    assert 0 < white.mean() < 0.5 and white[white.shape[0] // 2, white.shape[1] // 2] and not white[0].any()
    page.reload()
    page.locator("#mask .old").wait_for()
    page.get_by_role("button", name="Use these settings").locator("visible=true").click()
    wait_for_status(page, "Loaded the settings of seed 6")
    page.locator("#mask .old").wait_for()
    page.get_by_role("button", name="Generate").click()
    wait_for_status(page, "Drew 1 picture")
    wait_for_end(page)
    assert download(page, tmp_path / "second.png").read_bytes() == first.read_bytes()


def test_a_picture_is_drawn_again_larger(open_sd1, tmp_path):
    page = open_sd1()
    generate(page, steps=5, seed=5)
    wait_for_status(page, "Drew 1 picture")
    wait_for_end(page)
    page.get_by_role("button", name="Upscale 1.5x").locator("visible=true").click()
    expect(settings(page)).to_contain_text("Upscale")
    wait_for_end(page)
    record = png.read_settings(download(page, tmp_path / "large.png"))
    assert {"upscale": 1.5, "seed": 5, "width": 24, "height": 24}.items() <= record.items()


def test_the_new_fields_have_names_and_axe_finds_nothing_serious(open_sd1):
    page = open_sd1()
    open_start(page)
    drop(page, png_file(), "apple.png", onto=FIELD)
    wait_for_status(page, "Starts from apple.png")
    page.get_by_label("Paint a mask").locator("visible=true").check()
    page.locator("#mask canvas").first.wait_for()
    page.get_by_role("button", name="More settings").click()
    sliders = [f"{part} for Guidance {end}" for end in ("from", "until") for part in ("number input", "range slider")]
    wait_for_fields(page, "Guided part of the run", *sliders)
    pick(page, "Prompt syntax", "Weighted, as in A1111")
    combobox(page, "Emphasis").wait_for()
    wait_for_fields(page, "Reading of the prompt", "Prompt syntax", "Emphasis")
    assert problems(page) == []


def test_a_bad_picture_is_one_message(open_sd1):
    page = open_sd1()
    open_start(page)
    drop(page, b"no picture", "bad.png", onto=FIELD)
    wait_for_status(page, "Start picture 'bad.png' is not a picture that PIL reads")
    until(page, lambda: page.locator("#start-picture img").count() == 0)
