"""Browser tests of the History tab."""

import re
import zipfile

import pytest
from PIL import Image

from tests.ui.browser.actions import PHONE, captions, generate, screenshot, until, wait_for_end, wait_for_status

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

    def is_above_the_fold(part):
        box = page.locator(part).bounding_box()
        return box["y"] >= 0 and box["y"] + box["height"] <= 800

    until(page, lambda: is_above_the_fold("#delete") and is_above_the_fold("#history"))
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


def texts(page) -> list[str]:
    return page.locator("#history .caption-label").all_text_contents()


def test_pictures_are_searched_and_starred(page, tmp_path):
    open_history(page, range(40, 43))
    search = page.get_by_label("Search")
    search.fill("seed 41")
    until(page, lambda: captions(page, "#history") == ["seed 41"])
    search.fill("nothing like this")
    until(page, lambda: not texts(page))
    search.fill("")
    until(page, lambda: len(texts(page)) == 3)
    page.locator("#history .thumbnail-lg").nth(1).click()
    page.locator("#favourite").click()
    page.locator("#history-status").get_by_text("Added 1 picture to the favourites").wait_for()
    assert enlarged(page) == "41"
    page.get_by_label("Only favourites").check()
    until(page, lambda: captions(page, "#history") == ["seed 41"])
    assert texts(page)[0].strip().startswith("★")
    screenshot(page, "history-favourites", tmp_path)
    page.get_by_label("Only favourites").uncheck()
    until(page, lambda: len(texts(page)) == 3)


def test_previous_and_next_go_on_across_pages(page, monkeypatch):
    monkeypatch.setattr("fastdiff.ui.history_tab.PAGE_SIZE", 2)
    open_history_of_pages(page, range(50, 53))
    page.locator("#history .thumbnail-lg").first.click()
    assert enlarged(page) == "52"
    for seed in ("51", "50"):
        page.locator("#next").click()
        until(page, lambda seed=seed: enlarged(page) == seed)
    page.locator("#next").click()  # the last one
    page.wait_for_timeout(2000)
    assert enlarged(page) == "50" and page.get_by_label("Page").input_value() == "2"
    for seed in ("51", "52"):
        page.keyboard.press("ArrowLeft")
        until(page, lambda seed=seed: enlarged(page) == seed)
        page.wait_for_timeout(500)  # one step at a time
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(1000)
    assert enlarged(page) == "52" and page.get_by_label("Page").input_value() == "1"


def open_history_of_pages(page, seeds: range) -> None:
    generate(page, pictures=len(seeds), steps=1, seed=seeds[0])
    wait_for_status(page, f"Drew {len(seeds)} picture")
    page.get_by_role("tab", name="History").click()
    until(page, lambda: len(captions(page, "#history")) == 2)


def test_several_pictures_are_saved_starred_and_deleted(page, tmp_path):
    open_history(page, range(60, 64))
    page.get_by_label("Select several").check()
    page.locator("#selection").wait_for()
    for place in (0, 1, 2, 1):
        count = len([text for text in texts(page) if "✓" in text])
        page.locator("#history .thumbnail-lg").nth(place).click()
        until(page, lambda count=count: len([text for text in texts(page) if "✓" in text]) != count)
    assert [("✓" in text) for text in texts(page)] == [True, False, True, False]
    page.locator("#selection").get_by_text("2 selected").wait_for()
    assert page.locator("#history .preview").count() == 0
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
    until(page, lambda: captions(page, "#history") == ["seed 62", "seed 60"])
    page.locator("#undo").click()
    until(page, lambda: len(texts(page)) == 4)
    page.get_by_label("Select several").uncheck()
    page.locator("#selection").wait_for(state="detached")
    page.locator("#history .thumbnail-lg").first.click()
    assert enlarged(page) == "63"


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
    assert enlarged(page) == "71"
    until(page, lambda: has_own_row("#history-view"))
    screenshot(page, "history-phone", tmp_path, full_page=True)
