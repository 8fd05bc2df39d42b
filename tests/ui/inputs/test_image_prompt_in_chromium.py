"""IP-Adapters in Chromium: drop a picture, choose an IP-Adapter, draw, and bring it all back."""

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
    open_tab,
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
PLAIN, PLUS, FIELD = "./ip/plain.safetensors", "./ip/plus.safetensors", "#image-prompt button"


@pytest.fixture(scope="module")
def models_dir(prompted_dir) -> Path:
    return prompted_dir


@pytest.fixture(scope="module")
def shared(models_dir) -> Shared:
    return Shared(Models(models_dir, device="cpu"))


@pytest.fixture
def open_section(open_page):
    """Return a function that opens the page with the section of the IP-Adapter, and drops a picture there."""

    def open_one(size=DESKTOP):
        page = open_page(size)
        expect(page.locator("#ip-adapter")).to_be_hidden()
        pick(page, "Model", SD1)
        wait_for_status(page, f"Ready to draw with {SD1}")
        page.locator("#ip-adapter button.label-wrap").click()
        number(page, "IP-Adapter scale").wait_for()
        drop(page, png_file(), "apple.png", onto=FIELD)
        wait_for_status(page, f"{PLAIN} reads apple.png")
        page.locator("#image-prompt img").wait_for()
        return page

    return open_one


@SIZES
def test_a_picture_is_read_and_comes_back(open_section, open_page, size, tmp_path):
    page = open_section(size)
    pick(page, "IP-Adapter", PLUS)
    fill(page, {number(page, "IP-Adapter scale"): "0.6"})
    names = [name.splitlines()[0].strip("▼◀ ") for name in walk(page, "Draw")]
    assert are_in_order(names, "Start picture", "ControlNet", "number input for IP-Adapter scale", "More settings")
    screenshot(page, f"ip-adapter-{size['width']}", tmp_path, full_page=True)
    assert page.evaluate(HAS_NO_SIDE_SCROLL)
    page.reload()
    expect(number(page, "IP-Adapter scale")).to_have_value("0.6")
    page.locator("#image-prompt img").wait_for()
    generate(page, steps=2, seed=5)
    wait_for_status(page, "Drew 1 picture")
    wait_for_end(page)
    expect(settings(page)).to_contain_text("apple.png")
    first = download(page, tmp_path / "first.png")
    record = png.read_settings(first)
    assert (record["ip_adapter"], record["ip_adapter_scale"]) == ([PLUS], [0.6])
    assert png.read_input(first, "ip-adapter-image") == png_file()

    again = open_page(size)
    drop(again, first.read_bytes(), "first.png")
    wait_for_status(again, "Loaded the settings of first.png")
    expect(combobox(again, "IP-Adapter")).to_have_value(PLUS)
    again.get_by_role("button", name="Generate").click()
    wait_for_status(again, "Drew 1 picture")
    wait_for_end(again)
    assert download(again, tmp_path / "second.png").read_bytes() == first.read_bytes()


def test_history_brings_it_back_and_without_its_picture_there_is_none(open_section):
    page = open_section(PHONE)
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")
    wait_for_end(page)
    page.locator("#image-prompt").get_by_role("button", name="Remove Image").click()
    expect(combobox(page, "IP-Adapter")).to_have_value("None")
    open_tab(page, "History")
    page.locator("#history .thumbnail-lg").first.click()
    page.get_by_role("button", name="Use these settings").locator("visible=true").click()
    wait_for_status(page, "Loaded the settings of seed 0")
    expect(combobox(page, "IP-Adapter")).to_have_value(PLAIN)
    page.locator("#image-prompt img").wait_for()
    page.locator("#image-prompt").get_by_role("button", name="Remove Image").click()
    expect(combobox(page, "IP-Adapter")).to_have_value("None")
    pick(page, "IP-Adapter", PLAIN)
    page.get_by_role("button", name="Generate").click()
    page.locator(".actions .problem").get_by_text("Image prompt: the IP-Adapter reads a picture; drop one").wait_for()


def test_axe_finds_nothing_serious(open_section):
    assert problems(open_section()) == []


def test_a_bad_picture_is_one_message(open_section):
    page = open_section()
    page.locator("#image-prompt").get_by_role("button", name="Remove Image").click()
    drop(page, b"no picture", "bad.png", onto=FIELD)
    wait_for_status(page, "Image prompt 'bad.png' is not a picture that PIL reads")
    expect(page.locator("#image-prompt img")).to_have_count(0)
