"""Browser tests of models that read text."""

import re

import pytest

from tests.ui.browser.actions import drop, more_settings, number, pick, until, wait_for_status

pytestmark = pytest.mark.slow


def test_a_model_that_reads_text(page):
    pick(page, "Model", "./text/sd1")
    wait_for_status(page, "Ready to draw with ./text/sd1")
    for label in ("Style", "Group", "Label"):
        assert page.get_by_label(label, exact=True).locator("visible=true").count() == 0
    tokens = page.locator(".tokens").locator("visible=true").first
    tokens.get_by_text("0 of 22 tokens").wait_for()
    page.get_by_label("Prompt", exact=True).press_sequentially("the photo of")
    tokens.get_by_text("3 of 22 tokens").wait_for()
    page.get_by_label("Prompt", exact=True).fill("cat " * 22 + "astronaut")
    tokens.get_by_text("23 of 22 tokens; cut off: astronaut").wait_for()
    page.get_by_label("Prompt", exact=True).fill("the cat")
    page.get_by_label("Negative prompt").first.fill("photo")
    more_settings(page)
    values = {label: number(page, label).input_value() for label in ("Steps", "Guidance", "Clip skip", "Width")}
    assert values == {"Steps": "50", "Guidance": "7.5", "Clip skip": "0", "Width": "16"}
    assert page.get_by_label("Scheduler", exact=True).locator("visible=true").input_value() == "PNDM"
    page.get_by_role("radio", name="18x14").click()
    page.wait_for_function("document.querySelector('input[aria-label=\"number input for Width\"]').value === '18'")
    assert number(page, "Height").input_value() == "14"
    number(page, "Steps").fill("2")
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    wait_for_status(page, "Drew 1 picture")
    page.locator("#gallery").get_by_role("button", name=re.compile("Thumbnail 1")).first.click()
    settings = page.locator("dl.settings").first
    settings.wait_for()
    assert re.search(r"Prompt\s+the cat\s+Negative prompt\s+photo", settings.inner_text())
    page.get_by_label("Prompt", exact=True).fill("ocean")
    page.get_by_role("button", name="Use these settings").locator("visible=true").click()
    wait_for_status(page, "Loaded the settings of seed")
    assert page.get_by_label("Prompt", exact=True).input_value() == "the cat"
    assert page.get_by_role("radio", name="18x14").is_checked()


def test_a_prompt_has_lines_styles_and_a_list_of_the_last_ones(page):
    pick(page, "Model", "./text/sd1")
    wait_for_status(page, "Ready to draw with ./text/sd1")
    prompt = page.get_by_label("Prompt", exact=True)
    one_line = prompt.bounding_box()["height"]
    prompt.fill("the cat")
    for key in ("Enter", "Shift+Enter", "Enter", "Enter"):
        prompt.press(key)
        prompt.press_sequentially("of")
    assert prompt.input_value() == "the cat\nof\nof\nof\nof"
    until(page, lambda: prompt.bounding_box()["height"] > one_line)
    prompt.fill("the\ncat")
    counts = page.locator(".block.tokens").locator("visible=true")
    until(page, lambda: counts.all_inner_texts() == ["2 of 22 tokens", "0 of 22 tokens"])
    page.get_by_label("Styles", exact=True).locator("visible=true").click()
    page.get_by_role("option", name="wet").click()
    until(page, lambda: counts.all_inner_texts() == ["5 of 22 tokens", "1 of 22 tokens"])
    page.reload()
    until(page, lambda: counts.all_inner_texts() == ["5 of 22 tokens", "1 of 22 tokens"])
    assert prompt.input_value() == "the\ncat"
    more_settings(page)
    number(page, "Steps").fill("1")
    prompt.press("Control+Enter")
    wait_for_status(page, "Drew 1 picture")
    assert prompt.input_value() == "the\ncat"
    settings = page.locator("dl.settings").locator("visible=true")
    assert "the\ncat of the astronaut" in settings.inner_text()
    prompt.fill("dog")
    recent = page.get_by_label("Recent prompts").locator("visible=true")
    recent.click()
    page.get_by_role("option", name="the cat of the astronaut").click()
    until(page, lambda: prompt.input_value() == "the\ncat of the astronaut")
    until(page, lambda: counts.all_inner_texts() == ["5 of 22 tokens", "0 of 22 tokens"])
    assert recent.input_value() == ""


def test_the_end_of_a_prompt_that_was_cut_is_named_beside_the_picture(page):
    pick(page, "Model", "./text/sdxl")
    wait_for_status(page, "Ready to draw with ./text/sdxl")
    page.get_by_label("Prompt", exact=True).fill("cat " * 22 + "astronaut")
    page.locator(".tokens").get_by_text("cut off: astronaut").first.wait_for()
    page.get_by_role("button", name="Generate").click()
    wait_for_status(page, "Drew 1 picture")
    assert "cut: 'astronaut'" in page.locator("#status").inner_text()


def test_prompts_are_compared(page):
    page.get_by_role("tab", name="Compare").click()
    models = page.get_by_label("Model", exact=True).locator("visible=true")
    for i, name in enumerate(("./text/sd1", "./text/sdxl")):
        models.nth(i).click()
        page.get_by_role("option", name=name, exact=True).last.click()
        page.locator(".tokens").locator("visible=true").first.wait_for()
    page.get_by_label("Prompt", exact=True).locator("visible=true").fill("the cat")
    page.locator(".tokens").locator("visible=true").get_by_text("2 of 22 tokens").wait_for()
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator("dl.settings").locator("visible=true").get_by_text("Pixel difference").wait_for()
    page.get_by_role("tab", name="History").click()
    page.locator("#history").get_by_role("button", name=re.compile("Thumbnail 1")).first.click()
    page.locator("dl.settings").locator("visible=true").get_by_text("the cat").wait_for()


def test_a_png_of_a_prompt_that_is_dropped_on_another_tab_restores_it(page, engine, tmp_path):
    from fastdiff.ui.drawing import draw, prepare
    from fastdiff.ui.parts.request import Limits, UncheckedRequest

    options = UncheckedRequest(
        model="./text/sdxl", prompt="the cat", negative_prompt="ocean", clip_skip=1, seed=7, steps=2
    )
    *_, (_, [drawn]) = draw(prepare(options, engine, Limits()), engine, tmp_path)
    page.get_by_role("tab", name="Compare").click()
    drop(page, drawn.path.read_bytes(), "mine.png", onto=".side")
    wait_for_status(page, "Loaded the settings of mine.png")
    assert page.get_by_label("Model", exact=True).first.input_value() == "./text/sdxl"
    assert page.get_by_label("Prompt", exact=True).input_value() == "the cat"
    assert page.get_by_label("Negative prompt").first.input_value() == "ocean"
    more_settings(page)
    assert number(page, "Clip skip").input_value() == "1"
    page.get_by_role("button", name="Generate").click()
    wait_for_status(page, "Drew 1 picture")
    with page.expect_download() as download:
        page.locator("#gallery").get_by_role("button", name=re.compile("Thumbnail 1")).first.click()
        page.get_by_role("button", name="Download this picture").locator("visible=true").click()
    download.value.save_as(tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == drawn.path.read_bytes()
