"""Browser tests that no user input and no picture is lost."""

import re

import pytest

from tests.ui.browser.actions import (
    combobox,
    expect,
    fill,
    generate,
    more_settings,
    number,
    numbers,
    open_tab,
    pick,
    settings,
    textbox,
    until,
    wait_for_seeds,
    wait_for_status,
)

pytestmark = pytest.mark.slow
KEPT = "localStorage.getItem('fastdiff-form')"  # encrypted, with another salt each time


@pytest.mark.parametrize("leave", ["Tab", "Escape"])
def test_touching_the_model_keeps_the_form(page, leave):
    pick(page, "Style", "noto")
    pick(page, "Group", "animals: birds")
    more_settings(page)
    fill(page, {number(page, "Steps"): "7"})
    combobox(page, "Model").click()
    page.keyboard.press(leave)
    number(page, "Seed").click()
    page.wait_for_timeout(1000)
    expect(combobox(page, "Style")).to_have_value("noto")
    expect(combobox(page, "Group")).to_have_value("animals: birds")
    expect(number(page, "Steps")).to_have_value("7")


def test_touching_a_model_of_a_comparison_keeps_its_settings(page):
    open_tab(page, "Compare")
    pick(page, "Style", "noto")
    steps = numbers(page, "Steps")
    fill(page, {steps.nth(1): "7"})
    for i in (0, 1):
        combobox(page, "Model").nth(i).click()
        page.keyboard.press("Tab")
    page.wait_for_timeout(1000)
    expect(combobox(page, "Style")).to_have_value("noto")
    expect(steps.nth(0)).to_have_value("50")
    expect(steps.nth(1)).to_have_value("7")


def test_another_model_of_the_same_labels_keeps_what_was_set(page):
    pick(page, "Style", "noto")
    pick(page, "Group", "animals: birds")
    more_settings(page)
    fill(page, {number(page, "Steps"): "7"})
    pick(page, "Model", "emoji64-dit")
    wait_for_status(page, "Ready to draw with emoji64-dit")
    expect(combobox(page, "Style")).to_have_value("noto")
    expect(combobox(page, "Group")).to_have_value("animals: birds")
    expect(number(page, "Steps")).to_have_value("7")


@pytest.mark.parametrize("model", ["emoji64-dit", "./text/sd1"])
def test_the_form_survives_a_reload(page, model):
    pick(page, "Model", model)
    wait_for_status(page, f"Ready to draw with {model}")
    if model == "emoji64-dit":
        pick(page, "Style", "noto")
        pick(page, "Group", "animals: birds")
    else:
        textbox(page, "Prompt").fill("the cat")
    more_settings(page)
    fill(page, {number(page, "Steps"): "7", number(page, "Pictures"): "3"})
    before = page.evaluate(KEPT)
    number(page, "Seed").fill("99")
    until(page, lambda: page.evaluate(KEPT) != before)
    page.reload()
    expect(number(page, "Seed")).to_have_value("99")
    more_settings(page)
    expect(number(page, "Steps")).to_have_value("7")
    expect(number(page, "Pictures")).to_have_value("3")
    expect(combobox(page, "Model")).to_have_value(model)
    if model == "emoji64-dit":
        expect(combobox(page, "Style")).to_have_value("noto")
        expect(combobox(page, "Group")).to_have_value("animals: birds")
    else:
        expect(textbox(page, "Prompt")).to_have_value("the cat")


def test_another_model_of_prompts_keeps_the_prompt(page):
    pick(page, "Model", "./text/sd1")
    wait_for_status(page, "Ready to draw with ./text/sd1")
    textbox(page, "Prompt").fill("the cat")
    pick(page, "Model", "./text/sdxl")
    wait_for_status(page, "Ready to draw with ./text/sdxl")
    expect(textbox(page, "Prompt")).to_have_value("the cat")
    more_settings(page)
    expect(number(page, "Guidance")).to_have_value("5")


def enlarge(page, gallery: str = "#gallery", place: int = 1) -> None:
    page.locator(gallery).get_by_role("button", name=re.compile(f"Thumbnail {place}")).first.click()
    settings(page).wait_for()


def test_a_run_with_an_enlarged_picture_open_ends_with_the_settings_of_its_own(page):
    generate(page, steps=1, seed=5)
    wait_for_status(page, "Drew 1 picture")
    enlarge(page)
    fill(page, {number(page, "Seed"): "6"})
    page.get_by_role("button", name="Generate").click()
    settings(page).get_by_text("6", exact=True).wait_for()
    for name in ("Use these settings", "Download this picture"):
        expect(page.get_by_role("button", name=name)).to_have_count(1)
    page.keyboard.press("Escape")
    page.locator("#gallery .caption-label").get_by_text("seed 6").wait_for()


def test_closing_the_enlarged_picture_closes_its_settings(page):
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")
    enlarge(page)
    page.locator("#gallery").get_by_role("button", name=re.compile("Close")).click()
    expect(page.get_by_role("button", name="Use these settings")).to_have_count(0)


def test_history_refreshes_while_it_is_open_and_keeps_the_enlarged_picture(page, slow_steps):
    slow_steps.seconds = 100
    generate(page, pictures=3, steps=5, seed=30)
    slow_steps.turns.release(5)  # one picture
    wait_for_seeds(page, 30)
    open_tab(page, "History")
    enlarge(page, "#history")
    slow_steps.turns.release(100)
    page.locator("#history").get_by_role("button", name=re.compile("Thumbnail 3")).first.wait_for()
    expect(settings(page)).to_contain_text(re.compile(r"Seed\s+30"), use_inner_text=True)
    page.locator("#history").get_by_role("button", name=re.compile("Close")).click()
    wait_for_seeds(page, 32, 31, 30, gallery="#history")


def test_tab_closes_the_lists_that_it_leaves(page):
    combobox(page, "Model").focus()
    page.get_by_role("listbox").wait_for()
    for _ in range(3):
        page.keyboard.press("Tab")
        until(page, lambda: page.get_by_role("listbox").count() <= 1)
    expect(page.get_by_role("listbox")).to_have_count(0)


def test_ctrl_enter_draws(page):
    number(page, "Seed").fill("5")
    page.keyboard.press("Control+Enter")
    wait_for_status(page, "Drew 1 picture")
    open_tab(page, "History")
    wait_for_seeds(page, 5, gallery="#history")
