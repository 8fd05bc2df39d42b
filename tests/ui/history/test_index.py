"""The index: it follows the folder, whatever happened to its file, and finds words, models, days and favourites."""

import contextlib
import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from fastdiff.requests import png
from fastdiff.ui.history.favourites import Favourites
from fastdiff.ui.history.index import Index
from fastdiff.ui.history.search import Search

ALL = Search()
DAY = 86400
PIXELS = Image.new("RGB", (1, 1))
RECORD = {
    "prompt": "A Tree frog",
    "seed": 5,
    "label": None,
    "model": "emoji-sd",
    "scheduler": "ddim",
    "num_inference_steps": 20,
    "guidance_scale": 7.5,
    "width": 64,
    "height": 64,
    "eta": None,
    "versions": {"fastdiff": "0"},
}


def add(shelf: Path, name: str, at: int = 0, **settings) -> Path:
    path = shelf / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png.encode(PIXELS, RECORD | settings))
    os.utime(path, ns=(at, at))
    return path


def found(shelf: Path, search: Search = ALL, favourites=(), first: int = 0, count: int = 40) -> list[str]:
    return list(Index(shelf).find(search, favourites, first, count).paths)


def test_the_newest_are_first_also_within_a_second(tmp_path):
    for name, at in (("a.png", 3), ("2001-02-03/101112-abcd/b.png", 2), ("c.png", 1), ("d.png", 2)):
        add(tmp_path, name, at)
    assert found(tmp_path) == ["a.png", "d.png", "2001-02-03/101112-abcd/b.png", "c.png"]
    assert found(tmp_path, first=1, count=2) == ["d.png", "2001-02-03/101112-abcd/b.png"]
    assert Index(tmp_path).find(ALL, (), 1, 2).total == 4


def test_it_follows_the_folder(tmp_path):
    add(tmp_path, "run/a.png", 1)
    (tmp_path / "other.png").write_bytes(b"none of ours")
    assert found(tmp_path) == ["run/a.png"]
    add(tmp_path, "run/b.png", 2)
    add(tmp_path, "deep/er/c.png", 3)
    assert found(tmp_path) == ["deep/er/c.png", "run/b.png", "run/a.png"]
    (tmp_path / "run/b.png").unlink()
    (tmp_path / "deep").rename(tmp_path / "deeper")
    assert found(tmp_path) == ["deeper/er/c.png", "run/a.png"]
    add(tmp_path, "run/a.png", 4, prompt="another")
    assert found(tmp_path, Search("another")) == ["run/a.png"]


def test_a_settled_folder_is_not_read_again(tmp_path, monkeypatch):
    add(tmp_path, "a.png", 1)
    os.utime(tmp_path, (1, 1))
    found(tmp_path)
    os.utime(tmp_path, (1, 1))  # the index made its own folder
    found(tmp_path)
    monkeypatch.setattr("fastdiff.ui.history.index.list_folder", None)
    assert found(tmp_path) == ["a.png"]


@pytest.mark.parametrize("what", ["foreign", "text", "truncated", "flipped", "link", "pipe", "folder", "table"])
def test_a_file_that_is_no_index_is_replaced(tmp_path, what):
    add(tmp_path, "a.png", 1)
    file = Index(tmp_path).file
    found(tmp_path)
    data = file.read_bytes()
    file.unlink()
    if what == "foreign":
        with sqlite3.connect(file) as db:
            db.execute("CREATE TABLE pictures (path)")
        db.close()
    elif what == "link":
        file.symlink_to(tmp_path / "a.png")
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    elif what == "table":
        file.write_bytes(data)
        with sqlite3.connect(file) as db:
            db.execute("DROP TABLE folders")
        db.close()
    else:
        file.write_bytes(
            {"text": b"text" * 999, "truncated": data[:5000], "flipped": data[:100] + data[100:][::-1]}[what]
        )
    assert found(tmp_path) == ["a.png"]
    assert found(tmp_path) == ["a.png"]
    if what != "folder":  # it stays, and the index is in memory
        with contextlib.closing(sqlite3.connect(file)) as db:
            assert db.execute("SELECT path FROM pictures").fetchall() == [("a.png",)]


def test_threads_share_an_index(tmp_path):
    for number in range(30):
        add(tmp_path, f"{number}.png", number)
    results: list[list[str]] = []
    threads = [threading.Thread(target=lambda: results.append(found(tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[f"{number}.png" for number in reversed(range(30))]] * 6


def test_words_numbers_models_and_days_are_found(tmp_path):
    add(tmp_path, "frog.png", 0)
    add(tmp_path, "owl.png", 3 * DAY * 10**9, prompt="Große Eule", seed=55, model="other")
    add(tmp_path, "grid.png", 1, prompt=["a", "b"], seed=[7, 8])
    cases = {
        "frog tree": ["frog.png"],
        "GROSSE": ["owl.png"],
        "seed 5": ["frog.png"],
        "seed: 8": ["grid.png"],
        "owl": [],
        "guidance 7.5 ddim seed=55": ["owl.png"],
        "7%": [],
        "\0\ud800": [],
    }
    assert {text: found(tmp_path, Search(text)) for text in cases} == cases
    assert found(tmp_path, Search(model="other")) == ["owl.png"]
    days = Index(tmp_path).find(ALL, (), 0, 1).days
    assert found(tmp_path, Search(day=days[0])) == ["owl.png"] and len(days) == 2
    assert Index(tmp_path).find(ALL, (), 0, 1).models == ["emoji-sd", "other"]
    assert found(tmp_path, Search(only_favourites=True), ["frog.png", "gone.png"]) == ["frog.png"]


@pytest.mark.parametrize("value", [None, 5, [], {"a": 1}, "\ud800", True])
def test_values_of_any_kind_are_no_error(tmp_path, value):
    names = ("prompt", "seed", "model", "scheduler", "width")
    add(tmp_path, "a.png", 1)
    data = png.canonical_json({"schema": 1, **RECORD, **dict.fromkeys(names, value)})
    from fastdiff.requests.png_pixels import chunk

    plain = png.encode(PIXELS)
    (tmp_path / "b.png").write_bytes(plain[:33] + chunk(b"iTXt", b"fastdiff\0\0\0\0\0" + data.encode()) + plain[33:])
    assert found(tmp_path) == ["a.png"]
    assert Search.of_page(value, value, value, value).only_favourites is (value is True)
    found(tmp_path, Search.of_page(value, value, value, value))


def test_favourites_are_switched_and_survive(tmp_path):
    favourites, paths = Favourites(tmp_path), [tmp_path / "a.png", tmp_path / "b.png"]
    assert favourites.read() == []
    assert favourites.switch(paths[:1]) and favourites.switch(paths)
    assert favourites.read() == ["a.png", "b.png"]
    assert not favourites.switch(paths[1:])
    assert Favourites(tmp_path).read() == ["a.png"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[" * 9999, "\xff"])
def test_damaged_favourites_stay_as_they_are(tmp_path, text):
    favourites = Favourites(tmp_path)
    favourites.file.parent.mkdir()
    favourites.file.write_text(text, encoding="latin-1")
    assert favourites.read() == []
    with pytest.raises(ValueError, match=r"favourites\.json is damaged; mend or delete it"):
        favourites.switch([tmp_path / "a.png"])
    assert favourites.file.read_text(encoding="latin-1") == text


@pytest.mark.slow
def test_a_page_of_20_000_pictures_takes_tenths_of_a_second(tmp_path):
    first = add(tmp_path, "users/first.png")  # links to it are faster than files
    for run in range(5000):
        folder = tmp_path / "2001-02-03" / f"{run:06}-abcd"
        folder.mkdir(parents=True)
        for number in range(4):
            os.link(first, folder / f"{number}.png")
    time.sleep(2.1)  # until the folders are settled
    assert Index(tmp_path).find(ALL, (), 0, 40).total == 20_000
    seconds = []
    for search in (ALL, Search("frog seed 5"), Search("nothing"), ALL):
        start = time.perf_counter()
        Index(tmp_path).find(search, (), 4000, 40)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1


def test_the_last_prompts_are_each_there_once(tmp_path):
    for at, prompt in enumerate(("a fox", "a cat\nat night", "a fox", " ", ["a", "b"], "a dog", None), 1):
        add(tmp_path, f"{at}.png", at, prompt=prompt)
    assert Index(tmp_path).prompts(20) == ["a dog", "a fox", "a cat\nat night"]
    assert Index(tmp_path).prompts(2) == ["a dog", "a fox"]
    (tmp_path / "6.png").unlink()
    assert Index(tmp_path).prompts(1) == ["a fox"]
    assert Index(tmp_path / "none").prompts(1) == []
