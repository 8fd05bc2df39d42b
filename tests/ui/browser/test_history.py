"""Browser tests of the History tab."""

import pytest

from tests.ui.browser.actions import captions, generate, screenshot, until, wait_for_end, wait_for_status

pytestmark = pytest.mark.slow


def open_history(page, seeds: range) -> None:
    """Draw pictures, and open the History tab."""
    generate(page, pictures=len(seeds), steps=1, seed=seeds[0])
    wait_for_status(page, f"Drew {len(seeds)} picture")
    wait_for_end(page)
    page.get_by_role("tab", name="History").click()
    until(page, lambda: len(captions(page, "#history")) == len(seeds))


def enlarged(page) -> str:
    """Return the seed of the picture on the stage."""
    settings = page.locator("dl.settings").locator("visible=true")
    settings.wait_for()
    return settings.locator("dd").first.inner_text()


def test_delete_shows_the_next_picture_and_undo_the_deleted_one(page, tmp_path):
    open_history(page, range(20, 23))
    page.locator("#history .thumbnail-lg").nth(1).click()
    assert enlarged(page) == "21"
    for button in ("#delete", "#history"):
        box = page.locator(button).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 800, button
    assert page.locator("#delete").bounding_box()["width"] < 250
    page.locator("#delete").click()
    until(page, lambda: enlarged(page) == "20")
    page.locator("#history-status").get_by_text("Deleted 1 picture").wait_for()
    screenshot(page, "history-deleted", tmp_path)
    page.locator("#undo").click()
    until(page, lambda: enlarged(page) == "21")
    page.locator("#undo").wait_for(state="detached")
    assert page.locator("#history .thumbnail-small").count() == 3


def test_undo_goes_after_10_seconds(page):
    open_history(page, range(30, 31))
    page.locator("#history .thumbnail-lg").first.click()
    assert enlarged(page) == "30"
    page.locator("#delete").click()
    page.locator("#undo").wait_for()
    page.locator("dl.settings").locator("visible=true").wait_for(state="detached")
    page.locator("#undo").wait_for(state="detached")
