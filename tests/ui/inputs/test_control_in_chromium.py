"""ControlNets in Chromium: drop a picture, see its edges, draw, and bring it all back."""

from pathlib import Path

import pytest

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
    pick,
    screenshot,
    settings,
    wait_for_end,
    wait_for_status,
)
from tests.ui.browser.test_accessible import are_in_order, problems, walk
from tests.ui.inputs.conftest import png_file
from tests.ui.inputs.test_in_chromium import HAS_NO_SIDE_SCROLL, SD1, SIZES, download

pytestmark = pytest.mark.slow
NET, FIELD = "./nets/edges", "#control-picture button"


@pytest.fixture(scope="module")
def models_dir(controlled_dir) -> Path:
    return controlled_dir


@pytest.fixture(scope="module")
def shared(models_dir) -> Shared:
    return Shared(Models(models_dir, device="cpu"))


@pytest.fixture
def open_control(open_page):
    """Return a function that opens the page with the section of the ControlNet, and drops a picture there."""

    def open_one(size=DESKTOP):
        page = open_page(size)
        expect(page.locator("#control")).to_be_hidden()
        pick(page, "Model", SD1)
        wait_for_status(page, f"Ready to draw with {SD1}")
        page.locator("#control button.label-wrap").click()
        number(page, "Control scale").wait_for()
        drop(page, png_file(), "apple.png", onto=FIELD)
        wait_for_status(page, "./nets/depth follows apple.png")
        preview(page).wait_for()
        return page

    return open_one


def preview(page):
    return page.locator("#control-preview img")


@SIZES
def test_a_picture_is_followed_and_comes_back(open_control, open_page, size, tmp_path):
    page = open_control(size)
    pick(page, "ControlNet", NET)
    before = preview(page).get_attribute("src")
    fill(page, {number(page, "Low threshold"): "300", number(page, "Control scale"): "0.6"})
    page.locator("#control-preview").get_by_text("Low threshold 300: it is above the high threshold, 200").wait_for()
    fill(page, {number(page, "High threshold"): "450"})
    preview(page).wait_for()
    assert preview(page).get_attribute("src") != before
    names = [name.splitlines()[0].strip("▼◀ ") for name in walk(page, "Draw")]
    assert are_in_order(
        names, "Start picture", "Canny edges", "number input for Low threshold", "Guess mode", "More settings"
    )
    screenshot(page, f"control-{size['width']}", tmp_path, full_page=True)
    assert page.evaluate(HAS_NO_SIDE_SCROLL)
    page.reload()
    expect(number(page, "Control scale")).to_have_value("0.6")
    preview(page).wait_for()
    generate(page, steps=5, seed=5)
    wait_for_status(page, "Drew 1 picture")
    wait_for_end(page)
    expect(settings(page)).to_contain_text("edges.png")
    first = download(page, tmp_path / "first.png")
    record = png.read_settings(first)
    assert (record["control"], record["control_scale"], record["width"]) == ([NET], [0.6], 64)
    assert png.read_input(first, "control-image") is not None

    again = open_page(size)
    drop(again, first.read_bytes(), "first.png")
    wait_for_status(again, "Loaded the settings of first.png")
    expect(combobox(again, "ControlNet")).to_have_value(NET)
    expect(again.get_by_role("radio", name="None")).to_be_checked()
    expect(preview(again)).to_have_count(0)
    again.get_by_role("button", name="Generate").click()
    wait_for_status(again, "Drew 1 picture")
    wait_for_end(again)
    assert download(again, tmp_path / "second.png").read_bytes() == first.read_bytes()


def test_without_its_picture_there_is_no_controlnet(open_control):
    page = open_control(PHONE)
    page.get_by_role("radio", name="None").check()
    expect(preview(page)).to_have_count(0)
    page.get_by_role("radio", name="Canny edges").check()
    preview(page).wait_for()
    page.locator("#control-picture").get_by_role("button", name="Remove Image").click()
    expect(combobox(page, "ControlNet")).to_have_value("None")
    expect(preview(page)).to_have_count(0)
    pick(page, "ControlNet", NET)
    generate(page, steps=2)
    page.locator(".actions .problem").get_by_text("Control picture: the ControlNet reads a picture").wait_for()


def test_axe_finds_nothing_serious(open_control):
    page = open_control()
    assert problems(page) == []


def test_a_bad_picture_is_one_message(open_control):
    page = open_control()
    page.locator("#control-picture").get_by_role("button", name="Remove Image").click()
    drop(page, b"no picture", "bad.png", onto=FIELD)
    wait_for_status(page, "Control picture 'bad.png' is not a picture that PIL reads")
    expect(page.locator("#control-picture img")).to_have_count(0)
