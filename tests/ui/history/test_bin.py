"""The bin: a deletion is undone as a whole, with names, places and times, or is gone after 30 days."""

import os
import time
from pathlib import Path

import pytest

from fastdiff.ui.history.bin import KEPT, Bin


@pytest.fixture
def pictures(tmp_path) -> list[Path]:
    paths = [tmp_path / "2001-02-03" / run / "a.png" for run in ("101112-abcd", "101113-abcd")]
    for at, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        path.write_text(str(at))
        os.utime(path, ns=(at + 1, at + 1))
    return paths


def test_a_deletion_is_undone_with_names_places_and_times(tmp_path, pictures):
    shelf_bin = Bin(tmp_path)
    deletion = shelf_bin.put(pictures)
    assert not any(path.exists() for path in pictures) and shelf_bin.size() == 2
    assert shelf_bin.restore(deletion) == pictures
    assert [(path.read_text(), path.stat().st_mtime_ns) for path in pictures] == [("0", 1), ("1", 2)]
    assert shelf_bin.restore(deletion) == [] and list(shelf_bin.folder.iterdir()) == []


def test_a_name_that_is_taken_by_now_stays_whole(tmp_path, pictures):
    shelf_bin = Bin(tmp_path)
    deletion = shelf_bin.put(pictures[:1])
    pictures[0].write_text("new")
    (restored,) = shelf_bin.restore(deletion)
    assert restored.parent == pictures[0].parent and restored.name.startswith("a-")
    assert (pictures[0].read_text(), restored.read_text()) == ("new", "0")


def test_a_picture_that_is_gone_is_left_out(tmp_path, pictures):
    pictures[0].unlink()
    assert Bin(tmp_path).restore(Bin(tmp_path).put(pictures)) == pictures[1:]


def test_deletions_stay_for_30_days(tmp_path, pictures, monkeypatch):
    shelf_bin, now = Bin(tmp_path), time.time()
    shelf_bin.put(pictures[:1])
    monkeypatch.setattr("time.time", lambda: now + KEPT - 2)
    shelf_bin.empty()
    assert shelf_bin.size() == 1
    monkeypatch.setattr("time.time", lambda: now + KEPT + 2)
    shelf_bin.put(pictures[1:])
    assert [path.read_text() for path in shelf_bin.folder.rglob("*.png")] == ["1"]
    shelf_bin.empty(0)
    assert shelf_bin.size() == 0


def test_files_of_others_in_the_bin_stay(tmp_path):
    shelf_bin = Bin(tmp_path)
    shelf_bin.empty()
    (shelf_bin.folder / "notes").mkdir(parents=True)
    shelf_bin.empty(0)
    assert (shelf_bin.folder / "notes").exists()
