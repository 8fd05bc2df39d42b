"""Browser tests that no user input and no picture is lost."""

import re

import pytest

from tests.ui.browser.actions import (
    captions,
    fill,
    generate,
    more_settings,
    number,
    numbers,
    pick,
    until,
    wait_for_status,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("leave", ["Tab", "Escape"])
def test_touching_the_model_keeps_the_form(page, leave):
    pick(page, "Style", "noto")
    pick(page, "Group", "animals: birds")
    more_settings(page)
    fill(page, {number(page, "Steps"): "7"})
    page.get_by_label("Model", exact=True).first.click()
    page.keyboard.press(leave)
    page.get_by_label("Seed").first.click()
    page.wait_for_timeout(1000)
    assert page.get_by_label("Style").first.input_value() == "noto"
    assert page.get_by_label("Group").first.input_value() == "animals: birds"
    assert number(page, "Steps").input_value() == "7"


def test_touching_a_model_of_a_comparison_keeps_its_settings(page):
    page.get_by_role("tab", name="Compare").click()
    pick(page, "Style", "noto")
    steps = numbers(page, "Steps")
    fill(page, {steps.nth(1): "7"})
    for i in (0, 1):
        page.get_by_label("Model", exact=True).locator("visible=true").nth(i).click()
        page.keyboard.press("Tab")
    page.wait_for_timeout(1000)
    assert page.get_by_label("Style", exact=True).locator("visible=true").input_value() == "noto"
    assert [steps.nth(i).input_value() for i in (0, 1)] == ["50", "7"]


def test_another_model_of_the_same_labels_keeps_what_was_set(page):
    pick(page, "Style", "noto")
    pick(page, "Group", "animals: birds")
    more_settings(page)
    fill(page, {number(page, "Steps"): "7"})
    pick(page, "Model", "emoji64-dit")
    wait_for_status(page, "Ready to draw with emoji64-dit")
    assert page.get_by_label("Style").first.input_value() == "noto"
    assert page.get_by_label("Group").first.input_value() == "animals: birds"
    assert number(page, "Steps").input_value() == "7"


@pytest.mark.parametrize("model", ["emoji64-dit", "./text/sd1"])
def test_the_form_survives_a_reload(page, model):
    pick(page, "Model", model)
    wait_for_status(page, f"Ready to draw with {model}")
    if model == "emoji64-dit":
        pick(page, "Style", "noto")
        pick(page, "Group", "animals: birds")
    else:
        page.get_by_label("Prompt", exact=True).fill("the cat")
    more_settings(page)
    fill(page, {number(page, "Steps"): "7", number(page, "Pictures"): "3", page.get_by_label("Seed").first: "99"})
    page.wait_for_timeout(1000)
    page.reload()
    page.get_by_role("button", name="Generate").wait_for()
    until(page, lambda: page.get_by_label("Seed").first.input_value() == "99")
    more_settings(page)
    until(page, lambda: number(page, "Steps").input_value() == "7")
    assert page.get_by_label("Model", exact=True).first.input_value() == model
    assert [number(page, field).input_value() for field in ("Steps", "Pictures")] == ["7", "3"]
    assert page.get_by_label("Seed").first.input_value() == "99"
    if model == "emoji64-dit":
        assert page.get_by_label("Style").first.input_value() == "noto"
        assert page.get_by_label("Group").first.input_value() == "animals: birds"
    else:
        assert page.get_by_label("Prompt", exact=True).input_value() == "the cat"


def test_another_model_of_prompts_keeps_the_prompt(page):
    pick(page, "Model", "./text/sd1")
    wait_for_status(page, "Ready to draw with ./text/sd1")
    page.get_by_label("Prompt", exact=True).fill("the cat")
    pick(page, "Model", "./text/sdxl")
    wait_for_status(page, "Ready to draw with ./text/sdxl")
    assert page.get_by_label("Prompt", exact=True).input_value() == "the cat"
    more_settings(page)
    assert number(page, "Guidance").input_value() == "5"


def enlarge(page, gallery: str = "#gallery", place: int = 1) -> None:
    page.locator(gallery).get_by_role("button", name=re.compile(f"Thumbnail {place}")).first.click()
    page.locator("dl.settings").locator("visible=true").first.wait_for()


def test_a_run_with_an_enlarged_picture_open_ends_with_the_settings_of_its_own(page):
    generate(page, steps=1, seed=5)
    wait_for_status(page, "Drew 1 picture")
    enlarge(page)
    fill(page, {page.get_by_label("Seed").first: "6"})
    page.get_by_role("button", name="Generate").click()
    page.locator("dl.settings").locator("visible=true").get_by_text("6", exact=True).wait_for()
    for name in ("Use these settings", "Download this picture"):
        assert page.get_by_role("button", name=name).locator("visible=true").count() == 1
    page.keyboard.press("Escape")
    page.locator("#gallery .caption-label").get_by_text("seed 6").wait_for()


def test_closing_the_enlarged_picture_closes_its_settings(page):
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")
    enlarge(page)
    page.locator("#gallery").get_by_role("button", name=re.compile("Close")).click()
    page.get_by_role("button", name="Use these settings").locator("visible=true").wait_for(state="detached")


def test_history_refreshes_while_it_is_open_and_keeps_the_enlarged_picture(page, slow_steps):
    generate(page, pictures=3, steps=5, seed=30)
    page.locator("#gallery .caption-label").get_by_text("seed 30").wait_for()
    page.get_by_role("tab", name="History").click()
    enlarge(page, "#history")
    page.locator("#history").get_by_role("button", name=re.compile("Thumbnail 3")).first.wait_for()
    assert re.search(r"Seed\s+30", page.locator("dl.settings").locator("visible=true").inner_text())
    page.locator("#history").get_by_role("button", name=re.compile("Close")).click()
    page.locator("#history .caption-label").get_by_text("seed 32").wait_for()
    assert captions(page, "#history") == ["seed 32", "seed 31", "seed 30"]


def test_tab_closes_the_lists_that_it_leaves(page):
    page.get_by_label("Model", exact=True).first.focus()
    page.get_by_role("listbox").wait_for()
    for _ in range(3):
        page.keyboard.press("Tab")
        until(page, lambda: page.get_by_role("listbox").count() <= 1)
    until(page, lambda: page.get_by_role("listbox").count() == 0)


def test_ctrl_enter_draws(page):
    page.get_by_label("Seed").first.fill("5")
    page.keyboard.press("Control+Enter")
    wait_for_status(page, "Drew 1 picture")
    page.get_by_role("tab", name="History").click()
    page.locator("#history .caption-label").first.wait_for()
    assert captions(page, "#history") == ["seed 5"]
