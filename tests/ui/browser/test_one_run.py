"""One browser run of the page for `make test`: draw, view, restore. The other browser tests are slow."""

import re

import pytest

from fastdiff.requests import png
from tests.ui.browser.actions import captions, drop, generate, number, until, wait_for_end, wait_for_status


def test_pictures_are_drawn_shown_kept_and_restored(page, tmp_path):
    assert "press Generate" in page.locator("#status").inner_text()
    assert page.locator("#examples").is_visible()
    generate(page, pictures=2, steps=2, seed=40)
    wait_for_status(page, "Drew 2 pictures")
    assert captions(page) == ["seed 40", "seed 41"] and not page.locator("#examples").is_visible()
    page.locator("#gallery").get_by_role("button", name=re.compile("Thumbnail 2")).first.click()
    page.locator("dl.settings").get_by_text("41", exact=True).wait_for()
    image = page.locator("#gallery").get_by_test_id("detailed-image")
    until(page, lambda: image.evaluate("(image) => image.getBoundingClientRect().width % image.naturalWidth === 0"))
    assert image.evaluate("(image) => getComputedStyle(image).imageRendering") == "pixelated"
    with page.expect_download() as download:
        page.get_by_role("button", name="Download this picture").locator("visible=true").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert png.read_settings(path)["seed"] == 41
    for restore, said in (
        (page.get_by_role("button", name="Use these settings").locator("visible=true").click, "of seed 41"),
        (lambda: drop(page, path.read_bytes(), "mine.png"), "of mine.png"),
    ):
        number(page, "Steps").fill("7")
        page.get_by_label("Seed").first.fill("1")
        restore()
        wait_for_status(page, f"Loaded the settings {said}")
        until(page, lambda: page.get_by_label("Seed").first.input_value() == "41")
        assert number(page, "Steps").input_value() == "2"
    page.get_by_role("tab", name="History").click()
    page.locator("#history .caption-label").nth(1).wait_for()
    assert captions(page, "#history") == ["seed 41", "seed 40"]


@pytest.mark.slow
def test_a_run_is_cancelled_and_another_drawn(page, slow_steps):
    generate(page, pictures=5, steps=4)
    page.locator("#gallery .caption-label").get_by_text("seed 0").wait_for()
    page.get_by_role("button", name="Cancel").click()
    wait_for_status(page, "Cancelled")
    kept = captions(page)
    assert "seed 0" in kept and len(kept) < 5
    wait_for_end(page)
    slow_steps.seconds = 0
    generate(page, seed=9, steps=1)
    wait_for_status(page, "Drew 1 picture")
    assert captions(page) == ["seed 9"]
