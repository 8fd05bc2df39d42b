"""Browser tests of models that read text."""

import re

import pytest

from tests.ui.browser.actions import (
    combobox,
    drop,
    expect,
    fill,
    more_settings,
    number,
    open_tab,
    pick,
    settings,
    textbox,
    until,
    wait_for_status,
)

pytestmark = pytest.mark.slow


def test_a_model_that_reads_text(page):
    pick(page, "Model", "./text/sd1")
    wait_for_status(page, "Ready to draw with ./text/sd1")
    for name in ("Style", "Group", "Label"):
        expect(combobox(page, name)).to_have_count(0)
    tokens = page.locator(".tokens").locator("visible=true").first
    tokens.get_by_text("0 of 22 tokens").wait_for()
    prompt = textbox(page, "Prompt")
    prompt.press_sequentially("the photo of")
    tokens.get_by_text("3 of 22 tokens").wait_for()
    prompt.fill("cat " * 22 + "astronaut")
    tokens.get_by_text("23 of 22 tokens; cut off: astronaut").wait_for()
    fill(page, {prompt: "the cat", textbox(page, "Negative prompt"): "photo"})
    more_settings(page)
    for name, value in (("Steps", "50"), ("Guidance", "7.5"), ("Clip skip", "0"), ("Width", "16")):
        expect(number(page, name)).to_have_value(value)
    expect(combobox(page, "Scheduler")).to_have_value("PNDM")
    page.get_by_role("radio", name="18x14").click()
    expect(number(page, "Width")).to_have_value("18")
    expect(number(page, "Height")).to_have_value("14")
    fill(page, {number(page, "Steps"): "2"})
    prompt.press("Control+Enter")
    wait_for_status(page, "Drew 1 picture")
    page.locator("#gallery").get_by_role("button", name=re.compile("Thumbnail 1")).first.click()
    table = re.compile(r"Prompt\s+the cat\s+Negative prompt\s+photo")
    expect(settings(page)).to_contain_text(table, use_inner_text=True)
    prompt.fill("ocean")
    page.get_by_role("button", name="Use these settings").click()
    wait_for_status(page, "Loaded the settings of seed")
    expect(prompt).to_have_value("the cat")
    expect(page.get_by_role("radio", name="18x14")).to_be_checked()


def test_a_prompt_has_lines_styles_and_a_list_of_the_last_ones(page):
    pick(page, "Model", "./text/sd1")
    wait_for_status(page, "Ready to draw with ./text/sd1")
    prompt = textbox(page, "Prompt")
    one_line = prompt.bounding_box()["height"]
    prompt.fill("the cat")
    for key in ("Enter", "Shift+Enter", "Enter", "Enter"):
        prompt.press(key)
        prompt.press_sequentially("of")
    expect(prompt).to_have_value("the cat\nof\nof\nof\nof")
    until(page, lambda: prompt.bounding_box()["height"] > one_line)
    prompt.fill("the\ncat")
    counts = page.locator(".block.tokens").locator("visible=true")
    until(page, lambda: counts.all_inner_texts() == ["2 of 22 tokens", "0 of 22 tokens"])
    combobox(page, "Styles").click()
    page.get_by_role("option", name="wet").click()
    until(page, lambda: counts.all_inner_texts() == ["5 of 22 tokens", "1 of 22 tokens"])
    page.reload()
    until(page, lambda: counts.all_inner_texts() == ["5 of 22 tokens", "1 of 22 tokens"])
    expect(prompt).to_have_value("the\ncat")
    more_settings(page)
    fill(page, {number(page, "Steps"): "1"})
    prompt.press("Control+Enter")
    wait_for_status(page, "Drew 1 picture")
    expect(prompt).to_have_value("the\ncat")
    until(page, lambda: "the\ncat of the astronaut" in settings(page).inner_text())
    prompt.fill("dog")
    recent = combobox(page, "Recent prompts")
    recent.click()
    page.get_by_role("option", name="the cat of the astronaut").click()
    expect(prompt).to_have_value("the\ncat of the astronaut")
    until(page, lambda: counts.all_inner_texts() == ["5 of 22 tokens", "0 of 22 tokens"])
    expect(recent).to_have_value("")


def test_the_end_of_a_prompt_that_was_cut_is_named_beside_the_picture(page):
    pick(page, "Model", "./text/sdxl")
    wait_for_status(page, "Ready to draw with ./text/sdxl")
    textbox(page, "Prompt").fill("cat " * 22 + "astronaut")
    page.locator(".tokens").get_by_text("cut off: astronaut").first.wait_for()
    page.get_by_role("button", name="Generate").click()
    wait_for_status(page, "Drew 1 picture")
    wait_for_status(page, "cut: 'astronaut'")


def test_prompts_are_compared(page):
    open_tab(page, "Compare")
    models = combobox(page, "Model")
    for i, name in enumerate(("./text/sd1", "./text/sdxl")):
        models.nth(i).click()
        page.get_by_role("option", name=name, exact=True).last.click()
        page.locator(".tokens").locator("visible=true").first.wait_for()
    textbox(page, "Prompt").fill("the cat")
    page.locator(".tokens").locator("visible=true").get_by_text("2 of 22 tokens").wait_for()
    page.get_by_role("button", name="Compare", exact=True).click()
    settings(page).get_by_text("Pixel difference").wait_for()
    open_tab(page, "History")
    page.locator("#history").get_by_role("button", name=re.compile("Thumbnail 1")).first.click()
    settings(page).get_by_text("the cat").wait_for()


def test_a_png_of_a_prompt_that_is_dropped_on_another_tab_restores_it(page, shared, tmp_path):
    from fastdiff.ui.drawing import draw, prepare
    from fastdiff.ui.parts.request import Limits, UncheckedRequest

    options = UncheckedRequest(
        model="./text/sdxl", prompt="the cat", negative_prompt="ocean", clip_skip=1, seed=7, steps=2
    )
    *_, (_, [drawn]) = draw(prepare(options, shared, Limits()), shared, tmp_path)
    open_tab(page, "Compare")
    drop(page, drawn.path.read_bytes(), "mine.png", onto=".side")
    wait_for_status(page, "Loaded the settings of mine.png")
    expect(combobox(page, "Model")).to_have_value("./text/sdxl")
    expect(textbox(page, "Prompt")).to_have_value("the cat")
    expect(textbox(page, "Negative prompt")).to_have_value("ocean")
    more_settings(page)
    expect(number(page, "Clip skip")).to_have_value("1")
    page.get_by_role("button", name="Generate").click()
    wait_for_status(page, "Drew 1 picture")
    with page.expect_download() as download:
        page.locator("#gallery").get_by_role("button", name=re.compile("Thumbnail 1")).first.click()
        page.get_by_role("button", name="Download this picture").click()
    download.value.save_as(tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == drawn.path.read_bytes()
