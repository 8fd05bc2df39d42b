"""Browser tests of comparisons: two settings side by side, many in a sheet, and a run as a grid."""

import re

import pytest

from fastdiff.requests import png
from fastdiff.ui.progress import SMALL
from tests.ui.browser.actions import (
    combobox,
    drop,
    expect,
    fill,
    generate,
    more_settings,
    number,
    numbers,
    open_tab,
    pick,
    screenshot,
    settings,
    until,
    wait_for_status,
)

pytestmark = pytest.mark.slow


def test_a_picture_is_sent_to_compare_and_settings_come_back(page):
    more_settings(page)
    fill(page, {number(page, "Width"): "72"})
    generate(page, steps=2, seed=7)
    wait_for_status(page, "Drew 1 picture")
    page.get_by_role("button", name="Send to Compare").click()
    page.get_by_text("A and B have the settings of seed 7").wait_for()
    expect(numbers(page, "Seed")).to_have_value("7")
    steps, widths = numbers(page, "Steps"), numbers(page, "Width")
    for i in (0, 1):
        expect(steps.nth(i)).to_have_value("2")
        expect(widths.nth(i)).to_have_value("72")
    fill(page, {steps.nth(1): "3", widths.nth(0): "80", widths.nth(1): "80"})
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(settings(page)).to_contain_text(re.compile(r"PSNR [\d.]+ dB"), use_inner_text=True)
    page.get_by_role("button", name="Use the settings of B").click()
    wait_for_status(page, "Loaded the settings of seed 7")
    expect(page.get_by_role("tab", name="Draw")).to_have_attribute("aria-selected", "true")
    expect(numbers(page, "Steps")).to_have_value("3")
    expect(numbers(page, "Width")).to_have_value("80")


def test_each_side_has_a_live_preview_and_its_controls_on_one_line(page, slow_steps):
    open_tab(page, "Compare")

    def are_on_one_line(name):
        is_list = name in ("Model", "Scheduler")
        fields = combobox(page, name) if is_list else numbers(page, name)
        boxes = [fields.nth(i).bounding_box() for i in (0, 1)]
        tops = [combobox(page, "Model").nth(i).bounding_box() for i in (0, 1)]
        return all(abs(box["y"] - top["y"]) < 60 for box, top in zip(boxes, tops, strict=True))

    for name in ("Model", "Steps", "Scheduler", "Guidance", "Width", "Height"):
        until(page, lambda name=name: are_on_one_line(name))  # the tab may still be opening
    steps = numbers(page, "Steps")
    fill(page, {steps.nth(0): "5", steps.nth(1): "5"})
    slow_steps.seconds = 100
    page.get_by_role("button", name="Compare", exact=True).click()
    for i, turns in enumerate((1, 5)):  # as far as the first step of this side
        slow_steps.turns.release(turns)
        page.locator(".live").nth(i).locator("img").wait_for()
    slow_steps.turns.release(100)
    settings(page).get_by_text("Pixel difference").wait_for()
    expect(page.locator(".live img")).to_have_count(0)


@pytest.mark.parametrize("width", [1280, 1440, 390])
def test_pictures_stand_side_by_side_above_the_settings(page, tmp_path, width):
    page.set_viewport_size({"width": width, "height": 900})
    open_tab(page, "Compare")
    fill(page, {numbers(page, "Steps").nth(i): "1" for i in (0, 1)})
    page.get_by_role("button", name="Compare", exact=True).click()
    settings(page).get_by_text("Pixel difference").wait_for()
    page.get_by_test_id("imageslider-image").first.wait_for()

    def are_side_by_side_and_above():
        one, other = (page.locator(".enlarged").locator("visible=true").nth(i).bounding_box() for i in (0, 1))
        fields = [combobox(page, name) for name in ("Model", "Scheduler")]
        highest = min(field.nth(i).bounding_box()["y"] for field in fields for i in (0, 1))
        in_order = one["x"] + one["width"] <= other["x"] and other["x"] + other["width"] <= width
        slider = page.get_by_test_id("imageslider-image").first.bounding_box()
        is_between = one["y"] + one["height"] <= slider["y"] and slider["y"] + slider["height"] <= highest
        return in_order and one["y"] == other["y"] and is_between

    until(page, are_side_by_side_and_above)
    until(page, lambda: page.evaluate("document.documentElement.scrollWidth") <= width)
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, f"compare-{width}", tmp_path)


def test_a_sheet_of_two_axes_is_drawn_and_restored_and_a_run_saved_as_a_grid(page, tmp_path):
    generate(page, pictures=2, steps=1, seed=7)
    wait_for_status(page, "Drew 2 pictures")
    with page.expect_download() as grid:
        page.get_by_role("button", name="Save as grid").click()
    assert png.read_settings(grid.value.path())["seed"] == [7, 8]
    page.get_by_role("button", name="X/Y sheet").click()
    values = {axis: page.get_by_role("textbox", name=f"{axis} values") for axis in "XY"}
    for label, name in (("X: columns", "Steps"), ("Y: rows", "Seed")):
        pick(page, label, name)
        values[label[0]].wait_for()
    expect(values["Y"]).to_have_value("7, 8, 9, 10")
    fill(page, {values["X"]: "1, 2", values["Y"]: "3-4"})
    values["X"].focus()
    page.get_by_text("X/Y sheet: 2 x 2 = 4 pictures").wait_for()
    page.reload()
    page.get_by_text("X/Y sheet: 2 x 2 = 4 pictures").wait_for()
    page.locator("#generate").click()
    wait_for_status(page, "Drew 4 pictures and their sheet")
    shown = page.locator("#gallery [data-testid=detailed-image][alt='sheet of steps 1, 2 x seed 3, 4']")
    sizes = "(image) => [image.naturalWidth > %d, image.getBoundingClientRect().width / image.naturalWidth]"
    until(page, lambda: shown.evaluate(sizes % SMALL) == [True, 2])
    expect(shown).to_have_css("image-rendering", "pixelated")
    expect(page.get_by_role("button", name="Save as grid")).to_be_hidden()
    with page.expect_download() as sheet:
        page.get_by_role("button", name="Download this picture").click()
    pick(page, "X: columns", "None")
    page.get_by_text("X/Y sheet: 1 x 2 = 2 pictures").wait_for()
    drop(page, sheet.value.path().read_bytes(), "sheet.png")
    wait_for_status(page, "Loaded the settings of sheet.png, and its axes")
    page.get_by_text("X/Y sheet: 2 x 2 = 4 pictures").wait_for()
