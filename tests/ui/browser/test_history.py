"""Browser tests of the History tab."""

import re
import zipfile

import pytest
from PIL import Image

from tests.ui.browser.actions import (
    PHONE,
    expect,
    generate,
    number,
    open_tab,
    screenshot,
    settings,
    textbox,
    until,
    wait_for_end,
    wait_for_seeds,
    wait_for_status,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def slow_undo(monkeypatch):
    """Offer Undo for as long as a slow machine may need."""
    monkeypatch.setattr("fastdiff.ui.history_tab.UNDO", 300)


def open_history(page, seeds: range, page_size: int = 40) -> None:
    """Draw pictures, and open the History tab."""
    generate(page, pictures=len(seeds), steps=1, seed=seeds[0])
    wait_for_status(page, f"Drew {len(seeds)} picture")
    wait_for_end(page)
    open_tab(page, "History")
    wait_for_seeds(page, *seeds[: -page_size - 1 : -1], gallery="#history")


def wait_for_enlarged(page, seed: int) -> None:
    """Wait until the picture of this seed is on the stage, beside its settings."""
    expect(settings(page).locator("dd").first).to_have_text(str(seed))


def test_delete_shows_the_next_picture_and_undo_the_deleted_one(page, tmp_path, slow_undo):
    open_history(page, range(20, 23))
    page.locator("#history .thumbnail-lg").nth(1).click()
    wait_for_enlarged(page, 21)

    def is_above_the_fold(part):
        box = page.locator(part).bounding_box()
        return box["y"] >= 0 and box["y"] + box["height"] <= 800

    until(page, lambda: is_above_the_fold("#delete") and is_above_the_fold("#history"))
    until(page, lambda: page.locator("#delete").bounding_box()["width"] < 250)
    page.locator("#delete").click()
    wait_for_enlarged(page, 20)
    page.locator("#history-status").get_by_text("Deleted 1 picture").wait_for()
    screenshot(page, "history-deleted", tmp_path)
    page.locator("#undo").click()
    wait_for_enlarged(page, 21)
    expect(page.locator("#undo")).to_have_count(0)
    expect(page.locator("#history .thumbnail-small")).to_have_count(3)


def test_undo_goes_after_10_seconds(page):
    open_history(page, range(30, 31))
    page.locator("#history .thumbnail-lg").first.click()
    wait_for_enlarged(page, 30)
    page.locator("#delete").click()
    page.locator("#undo").wait_for()
    expect(settings(page)).to_have_count(0)
    expect(page.locator("#undo")).to_have_count(0)


def texts(page) -> list[str]:
    return page.locator("#history .caption-label").all_text_contents()


def test_pictures_are_searched_and_starred(page, tmp_path):
    open_history(page, range(40, 43))
    search = textbox(page, "Search")
    for words, found in (("seed 41", [41]), ("nothing like this", []), ("", [42, 41, 40])):
        search.fill(words)
        wait_for_seeds(page, *found, gallery="#history")
    page.locator("#history .thumbnail-lg").nth(1).click()
    page.locator("#favourite").click()
    page.locator("#history-status").get_by_text("Added 1 picture to the favourites").wait_for()
    wait_for_enlarged(page, 41)
    page.get_by_role("checkbox", name="Only favourites").check()
    wait_for_seeds(page, 41, gallery="#history")
    expect(page.locator("#history .caption-label")).to_have_text(re.compile("^★"))
    screenshot(page, "history-favourites", tmp_path)
    page.get_by_role("checkbox", name="Only favourites").uncheck()
    wait_for_seeds(page, 42, 41, 40, gallery="#history")


def test_previous_and_next_go_on_across_pages(page, monkeypatch):
    monkeypatch.setattr("fastdiff.ui.history_tab.PAGE_SIZE", 2)
    open_history(page, range(50, 53), page_size=2)
    page.locator("#history .thumbnail-lg").first.click()
    wait_for_enlarged(page, 52)
    for seed in (51, 50):
        page.locator("#next").click()
        wait_for_enlarged(page, seed)
    page.locator("#next").click()  # the last one
    page.wait_for_timeout(2000)
    wait_for_enlarged(page, 50)
    expect(number(page, "Page")).to_have_value("2")
    for seed in (51, 52):
        page.keyboard.press("ArrowLeft")
        wait_for_enlarged(page, seed)
        page.wait_for_timeout(500)  # one step at a time
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(1000)
    wait_for_enlarged(page, 52)
    expect(number(page, "Page")).to_have_value("1")


def test_several_pictures_are_saved_starred_and_deleted(page, tmp_path, slow_undo):
    open_history(page, range(60, 64))
    page.get_by_role("checkbox", name="Select several").check()
    page.locator("#selection").wait_for()
    for place, wanted in ((0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (1, [0, 2])):
        page.locator("#history .thumbnail-lg").nth(place).click()
        until(page, lambda wanted=wanted: [i for i, text in enumerate(texts(page)) if "✓" in text] == wanted)
    page.locator("#selection").get_by_text("2 selected").wait_for()
    expect(page.locator("#history .preview")).to_have_count(0)
    screenshot(page, "history-selected", tmp_path)
    for name, file in (("Save as ZIP", "pictures.zip"), ("Save as one grid", "grid.png")):
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        assert download.value.suggested_filename == file
        download.value.save_as(tmp_path / file)
    with zipfile.ZipFile(tmp_path / "pictures.zip") as saved:
        assert [re.search(r"\d+(?=\.png)", name)[0] for name in saved.namelist()] == ["63", "61"]
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (2 * 64 + 3 * 2, 64 + 2 * 2)
    page.get_by_role("button", name="Favourite all").click()
    until(page, lambda: ["★" in text for text in texts(page)] == [True, False, True, False])
    page.get_by_role("button", name="Delete all").click()
    wait_for_seeds(page, 62, 60, gallery="#history")
    page.locator("#undo").click()
    wait_for_seeds(page, 63, 62, 61, 60, gallery="#history")
    page.get_by_role("checkbox", name="Select several").uncheck()
    expect(page.locator("#selection")).to_have_count(0)
    page.locator("#history .thumbnail-lg").first.click()
    wait_for_enlarged(page, 63)


def test_a_phone_has_its_own_rows(open_page, tmp_path):
    page = open_page(PHONE)
    open_history(page, range(70, 72))

    def box(name):
        return page.locator(name).bounding_box()

    def has_own_row(name):
        return box(name)["y"] + box(name)["height"] <= box("#previous")["y"] == box("#next")["y"]

    until(page, lambda: box("#history-search")["width"] == box("#history-page")["width"])
    until(page, lambda: box("#history-status")["width"] > 300)
    page.locator("#history .thumbnail-lg").first.click()
    wait_for_enlarged(page, 71)
    until(page, lambda: has_own_row("#history-view"))
    screenshot(page, "history-phone", tmp_path, full_page=True)
