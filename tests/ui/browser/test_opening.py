"""Browser test of the page as a new user sees it, with its first model."""

import re

import pytest

from tests.ui.browser.actions import expect, settings, textbox, until, wait_for_status

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def opens(as_bundled):
    with as_bundled():
        yield


def test_the_first_click_draws_what_its_prompt_says(page):
    expect(textbox(page, "Prompt")).to_have_value("cat face, glossy 3D emoji")
    page.get_by_role("button", name="Generate").click()
    wait_for_status(page, "Drew 1 picture")
    picture = page.locator("#gallery").get_by_test_id("detailed-image")
    expect(picture).to_have_attribute("alt", re.compile(r"^seed \d+, cat face, glossy 3D emoji$"))


def test_the_empty_stage_has_examples_that_a_click_draws(page):
    examples = page.locator("#examples")
    expect(examples.get_by_role("button")).to_have_count(6)

    def is_on_stage(example):
        box, stage = example.bounding_box(), page.locator("#gallery").bounding_box()
        is_wide = stage["x"] < box["x"] < box["x"] + box["width"] < stage["x"] + stage["width"]
        return is_wide and stage["y"] < box["y"] < box["y"] + box["height"] < stage["y"] + stage["height"]

    until(page, lambda: all(map(is_on_stage, examples.get_by_role("button").all())))
    examples.get_by_role("button", name="rocket").click()
    settings(page).get_by_text("rocket, flat emoji").wait_for()
    picture = page.locator("#gallery").get_by_test_id("detailed-image")
    expect(picture).to_have_attribute("alt", "seed 2, rocket, flat emoji")
    expect(examples).to_be_hidden()
