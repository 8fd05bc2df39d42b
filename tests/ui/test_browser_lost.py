"""Nothing that somebody has set or drawn is lost, in a real browser."""

import pytest

from tests.ui.browsing import fill, more_settings, number, pick, wait_for_status


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
    steps = page.get_by_label("number input for Steps").locator("visible=true")
    fill(page, {steps.nth(1): "7"})
    for i in (0, 1):
        page.get_by_label("Model", exact=True).locator("visible=true").nth(i).click()
        page.keyboard.press("Tab")
    page.wait_for_timeout(1000)
    assert page.get_by_label("Style", exact=True).locator("visible=true").input_value() == "noto"
    assert [steps.nth(i).input_value() for i in (0, 1)] == ["20", "7"]


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


def test_another_model_of_prompts_keeps_the_prompt(page):
    pick(page, "Model", "./text/sd1")
    wait_for_status(page, "Ready to draw with ./text/sd1")
    page.get_by_label("Prompt", exact=True).fill("the cat")
    pick(page, "Model", "./text/sdxl")
    wait_for_status(page, "Ready to draw with ./text/sdxl")
    assert page.get_by_label("Prompt", exact=True).input_value() == "the cat"
    more_settings(page)
    assert number(page, "Guidance").input_value() == "5"
