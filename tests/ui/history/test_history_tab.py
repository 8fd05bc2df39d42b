"""The events of the History tab, without a server."""

import json

import pytest
from PIL.PngImagePlugin import PngInfo

from tests.ui.history.test_index import PIXELS, RECORD, add
from tests.ui.history.unserved import UnservedPage


@pytest.fixture
def page(tmp_path, unserved_page) -> UnservedPage:
    """The page of a shelf with three pictures."""
    for number in range(3):
        add(tmp_path / "shelf", f"{number}.png", number, seed=number)
    page = unserved_page(outputs=tmp_path / "shelf")
    page.press("HistoryTab.show")
    return page


def captions(answer: str) -> list[str]:
    """Return the captions in the JSON of an answer."""
    values = [part["value"] for part in json.loads(answer) if isinstance(part, dict) and "value" in part]
    (pictures,) = [value for value in values if isinstance(value, list)]
    return [picture["caption"] for picture in pictures]


def test_a_page_is_selected_without_reading_its_pictures_again(page, monkeypatch):
    page.press("HistoryTab.select_several", {"Select several": True})
    page.press("HistoryTab.pick", index=1)
    monkeypatch.setattr("fastdiff.requests.png.read_settings", None)
    answer = page.press("HistoryTab.select_page")
    assert captions(answer) == [f"✓ A Tree frog, seed {seed}" for seed in (2, 1, 0)] and "3 selected" in answer
    assert [drawn.record["seed"] for drawn in page.session.selected] == [1, 2, 0]


def test_a_page_is_not_selected_while_one_picture_is(page):
    page.press("HistoryTab.select_page")
    assert page.session.selected is None


ODD = (None, True, -1, 0.5, 1e-320, 10**18, "", "x", "a\0b", [], [None], [1, "x", {}], {}, {"a": 1})


@pytest.mark.parametrize(
    "key", [*RECORD, "negative_prompt", "clip_skip", "model_hash", "precision", "axes", "init_image", "strength"]
)
def test_a_picture_with_an_odd_setting_is_shown_or_left_out(page, tmp_path, key):
    for place, value in enumerate(ODD):
        info = PngInfo()
        info.add_itxt("fastdiff", json.dumps(RECORD | {"schema": 1, "seed": 3, key: value}))
        PIXELS.save(tmp_path / "shelf" / f"odd {place}.png", pnginfo=info)
    page.press("HistoryTab.show")
    shown = [page.press("Panel.follow.<locals>.show", index=place) for place in range(len(page.session.listed))]
    assert all("Settings of this picture" in answer for answer in shown)
    assert {drawn.path.name for drawn in page.session.listed} >= {"0.png", "1.png", "2.png"}


def test_a_picture_that_another_program_removed_is_not_shown(page, tmp_path):
    page.press("Panel.follow.<locals>.show", index=0)
    (tmp_path / "shelf" / "1.png").unlink()
    answer = page.press("HistoryTab.following")
    assert captions(answer) == [f"A Tree frog, seed {seed}" for seed in (2, 0)]
    (tmp_path / "shelf" / "2.png").unlink()
    assert "Settings of this picture" not in page.press("Panel.follow.<locals>.show", index=0)
    assert "Settings of this picture" in page.press("Panel.follow.<locals>.show", index=1)


def test_a_folder_that_became_a_loop_of_links_is_left_out(page, tmp_path):
    add(tmp_path / "shelf", "run/3.png", 3, seed=3)
    page.press("HistoryTab.show")
    (tmp_path / "shelf" / "run").rename(tmp_path / "gone")
    (tmp_path / "shelf" / "run").symlink_to("run")
    assert captions(page.press("HistoryTab.previous")) == [f"A Tree frog, seed {seed}" for seed in (2, 1, 0)]


@pytest.mark.parametrize("index", ["Grid", None, 0.0, -1, 3, [1]])
def test_a_click_on_no_picture_shows_none(page, index):
    assert "Settings of this picture" not in page.press("Panel.follow.<locals>.show", index=index)
    page.press("HistoryTab.select_several", {"Select several": True})
    page.press("HistoryTab.pick", index=index)
    assert page.session.selected == []


def test_a_refresh_keeps_the_page_that_was_opened_last(page, monkeypatch):
    monkeypatch.setattr("fastdiff.ui.history_tab.PAGE_SIZE", 2)
    for number, seeds in ((2, [0]), (1, [2, 1])):
        page.press("HistoryTab.show", {"Page": number})
        page.press("HistoryTab.refresh", {"Page": 3 - number})
        assert [drawn.record["seed"] for drawn in page.session.listed] == seeds
