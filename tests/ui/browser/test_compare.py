"""Browser tests of comparisons: two settings side by side, many in a sheet, and a run as a grid."""

import re

import pytest

from fastdiff.requests import png
from fastdiff.ui.progress import SMALL
from tests.ui.browser.actions import (
    drop,
    fill,
    generate,
    more_settings,
    number,
    numbers,
    pick,
    screenshot,
    until,
    wait_for_status,
)

pytestmark = pytest.mark.slow


def test_a_picture_is_sent_to_compare_and_settings_come_back(page):
    more_settings(page)
    fill(page, {number(page, "Width"): "72"})
    generate(page, steps=2, seed=7)
    wait_for_status(page, "Drew 1 picture")
    page.get_by_role("button", name="Send to Compare").locator("visible=true").click()
    page.get_by_text("A and B have the settings of seed 7").wait_for()
    steps = numbers(page, "Steps")
    assert [steps.nth(i).input_value() for i in (0, 1)] == ["2", "2"]
    assert page.get_by_label("Seed", exact=True).locator("visible=true").input_value() == "7"
    widths = numbers(page, "Width")
    assert [widths.nth(i).input_value() for i in (0, 1)] == ["72", "72"]
    fill(page, {steps.nth(1): "3", widths.nth(0): "80", widths.nth(1): "80"})
    page.get_by_role("button", name="Compare", exact=True).click()
    table = page.locator("dl.settings").locator("visible=true")
    table.get_by_text("Pixel difference").wait_for()
    assert re.search(r"PSNR [\d.]+ dB", table.inner_text())
    page.get_by_role("button", name="Use the settings of B").click()
    wait_for_status(page, "Loaded the settings of seed 7")
    assert page.get_by_role("tab", name="Draw").get_attribute("aria-selected") == "true"
    assert (number(page, "Steps").input_value(), number(page, "Width").input_value()) == ("3", "80")


def test_each_side_has_a_live_preview_and_its_controls_on_one_line(page, slow_steps):
    page.get_by_role("tab", name="Compare").click()

    def are_on_one_line(name):
        is_list = name in ("Model", "Scheduler")
        fields = page.get_by_label(name, exact=True).locator("visible=true") if is_list else numbers(page, name)
        boxes = [fields.nth(i).bounding_box() for i in (0, 1)]
        models = page.get_by_label("Model", exact=True).locator("visible=true")
        tops = [models.nth(i).bounding_box() for i in (0, 1)]
        return all(abs(box["y"] - top["y"]) < 60 for box, top in zip(boxes, tops, strict=True))

    for name in ("Model", "Steps", "Scheduler", "Guidance", "Width", "Height"):
        until(page, lambda name=name: are_on_one_line(name))  # the tab may still be opening
    steps = numbers(page, "Steps")
    fill(page, {steps.nth(0): "5", steps.nth(1): "5"})
    page.get_by_role("button", name="Compare", exact=True).click()
    lives = page.locator(".live")
    for i in (0, 1):
        lives.nth(i).locator("img").wait_for()
    page.locator("dl.settings").locator("visible=true").get_by_text("Pixel difference").wait_for()
    assert page.locator(".live img").count() == 0


@pytest.mark.parametrize("width", [1280, 1440, 390])
def test_pictures_stand_side_by_side_above_the_settings(page, tmp_path, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.get_by_role("tab", name="Compare").click()
    fill(page, {numbers(page, "Steps").nth(i): "1" for i in (0, 1)})
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator("dl.settings").locator("visible=true").get_by_text("Pixel difference").wait_for()

    def are_side_by_side_and_above():
        one, other = (page.locator(".enlarged").locator("visible=true").nth(i).bounding_box() for i in (0, 1))
        fields = [page.get_by_label(name, exact=True).locator("visible=true") for name in ("Model", "Scheduler")]
        highest = min(field.nth(i).bounding_box()["y"] for field in fields for i in (0, 1))
        in_order = one["x"] + one["width"] <= other["x"] and other["x"] + other["width"] <= width
        return in_order and one["y"] == other["y"] and one["y"] + one["height"] <= highest

    until(page, are_side_by_side_and_above)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, f"compare-{width}", tmp_path)


def test_a_sheet_of_two_axes_is_drawn_and_restored_and_a_run_saved_as_a_grid(page, tmp_path):
    generate(page, pictures=2, steps=1, seed=7)
    wait_for_status(page, "Drew 2 pictures")
    with page.expect_download() as grid:
        page.get_by_role("button", name="Save as grid").click()
    assert png.read_settings(grid.value.path())["seed"] == [7, 8]
    page.get_by_role("button", name="X/Y sheet").click()
    for label, name in (("X: columns", "Steps"), ("Y: rows", "Seed")):
        pick(page, label, name)
        page.get_by_label(f"{label[0]} values").wait_for()
        page.get_by_role("option").first.wait_for(state="detached")
    assert page.get_by_label("Y values").input_value() == "7, 8, 9, 10"
    fill(page, {page.get_by_label("X values"): "1, 2", page.get_by_label("Y values"): "3-4"})
    page.get_by_label("X values").focus()
    page.get_by_text("X/Y sheet: 2 x 2 = 4 pictures").wait_for()
    page.reload()
    page.get_by_text("X/Y sheet: 2 x 2 = 4 pictures").wait_for()
    page.locator("#generate").click()
    wait_for_status(page, "Drew 4 pictures and their sheet")
    shown = page.locator("#gallery [data-testid=detailed-image][alt='sheet of steps 1, 2 x seed 3, 4']")
    shown.wait_for()
    page.wait_for_function("(image) => image.matches('[data-small]')", arg=shown.element_handle())
    width, natural, crisp = shown.evaluate(
        "(image) => [image.getBoundingClientRect().width, image.naturalWidth, getComputedStyle(image).imageRendering]"
    )
    assert natural > SMALL and (width, crisp) == (2 * natural, "pixelated")
    assert page.get_by_role("button", name="Save as grid").is_hidden()
    with page.expect_download() as sheet:
        page.get_by_role("button", name="Download this picture").locator("visible=true").click()
    pick(page, "X: columns", "None")
    page.get_by_text("X/Y sheet: 1 x 2 = 2 pictures").wait_for()
    drop(page, sheet.value.path().read_bytes(), "sheet.png")
    wait_for_status(page, "Loaded the settings of sheet.png, and its axes")
    page.get_by_text("X/Y sheet: 2 x 2 = 4 pictures").wait_for()
