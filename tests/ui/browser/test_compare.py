"""Two settings side by side, in a real browser."""

import re

from tests.ui.browser.actions import fill, generate, wait_for_status


def test_a_picture_is_sent_to_compare_and_settings_come_back(page):
    generate(page, steps=2, seed=7)
    wait_for_status(page, "Drew 1 picture")
    page.get_by_role("button", name="Send to Compare").locator("visible=true").click()
    page.get_by_text("A and B are as seed 7").wait_for()
    steps = page.get_by_label("number input for Steps").locator("visible=true")
    assert [steps.nth(i).input_value() for i in (0, 1)] == ["2", "2"]
    assert page.get_by_label("Seed", exact=True).locator("visible=true").input_value() == "7"
    fill(page, {steps.nth(1): "3"})
    page.get_by_role("button", name="Compare", exact=True).click()
    table = page.locator("dl.settings").locator("visible=true")
    table.get_by_text("Pixel difference").wait_for()
    assert re.search(r"PSNR [\d.]+ dB", table.inner_text())
    page.get_by_role("button", name="Use the settings of B").click()
    wait_for_status(page, "Settings of seed 7 are in the form")
    assert page.get_by_role("tab", name="Draw").get_attribute("aria-selected") == "true"
    assert page.get_by_label("number input for Steps").locator("visible=true").first.input_value() == "3"


def test_each_side_has_a_live_preview_and_its_controls_on_one_line(page, slow_steps):
    page.get_by_role("tab", name="Compare").click()
    for name in ("Model", "Steps", "Scheduler", "Guidance"):
        label = {"Steps": "number input for Steps", "Guidance": "number input for Guidance"}.get(name, name)
        fields = page.get_by_label(label, exact=True).locator("visible=true")
        boxes = [fields.nth(i).bounding_box() for i in (0, 1)]
        models = page.get_by_label("Model", exact=True).locator("visible=true")
        tops = [models.nth(i).bounding_box() for i in (0, 1)]
        assert all(abs(box["y"] - top["y"]) < 60 for box, top in zip(boxes, tops, strict=True))
    steps = page.get_by_label("number input for Steps").locator("visible=true")
    fill(page, {steps.nth(0): "5", steps.nth(1): "5"})
    page.get_by_role("button", name="Compare", exact=True).click()
    lives = page.locator(".live")
    for i in (0, 1):
        lives.nth(i).locator("img").wait_for()
    page.locator("dl.settings").locator("visible=true").get_by_text("Pixel difference").wait_for()
    assert page.locator(".live img").count() == 0
