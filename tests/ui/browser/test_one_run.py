"""One browser run of the page for `make test`: draw, view, restore. The other browser tests are slow."""

import re

import pytest

from fastdiff.requests import png
from tests.ui.browser.actions import (
    drop,
    expect,
    fill,
    generate,
    number,
    open_tab,
    settings,
    until,
    wait_for_end,
    wait_for_seeds,
    wait_for_status,
)


def test_pictures_are_drawn_shown_kept_and_restored(page, tmp_path):
    wait_for_status(page, "press Generate")
    page.locator("#examples").wait_for()
    generate(page, pictures=2, steps=2, seed=40)
    wait_for_status(page, "Drew 2 pictures")
    wait_for_seeds(page, 40, 41)
    expect(page.locator("#examples")).to_be_hidden()
    page.locator("#gallery").get_by_role("button", name=re.compile("Thumbnail 2")).first.click()
    settings(page).get_by_text("41", exact=True).wait_for()
    image = page.locator("#gallery").get_by_test_id("detailed-image")
    factor = "(image) => image.getBoundingClientRect().width / image.naturalWidth"
    until(page, lambda: image.evaluate(f"{factor} >= 1") and image.evaluate(f"{factor} % 1") == 0)
    expect(image).to_have_css("image-rendering", "pixelated")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download this picture").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert png.read_settings(path)["seed"] == 41
    for restore, said in (
        (page.get_by_role("button", name="Use these settings").click, "of seed 41"),
        (lambda: drop(page, path.read_bytes(), "mine.png"), "of mine.png"),
    ):
        fill(page, {number(page, "Steps"): "7", number(page, "Seed"): "1"})
        restore()
        wait_for_status(page, f"Loaded the settings {said}")
        expect(number(page, "Seed")).to_have_value("41")
        expect(number(page, "Steps")).to_have_value("2")
    open_tab(page, "History")
    wait_for_seeds(page, 41, 40, gallery="#history")


@pytest.mark.slow
def test_a_run_is_cancelled_and_another_drawn(page, slow_steps):
    slow_steps.seconds = 100
    generate(page, pictures=5, steps=4)
    slow_steps.turns.release(4)  # one picture
    wait_for_seeds(page, 0)
    page.get_by_role("button", name="Cancel").click()
    wait_for_status(page, "Cancelled")
    wait_for_end(page)
    wait_for_seeds(page, 0)
    slow_steps.turns.release(100)
    generate(page, seed=9, steps=1)
    wait_for_status(page, "Drew 1 picture")
    wait_for_seeds(page, 9)
