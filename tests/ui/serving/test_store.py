"""The stored pictures: dated, newest first, separate per owner, within a quota, and kept after a restart."""

import os
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from gradio_client import Client

from fastdiff.errors import InputError
from fastdiff.execution import temporaries
from fastdiff.ui.history.bin import HIDDEN
from fastdiff.ui.history_tab import PAGE_SIZE
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.server import remove_abandoned, serving
from fastdiff.ui.serving.access import Users
from fastdiff.ui.serving.store import Shelf, Store

GRADIO_WARNINGS = ("ignore:'future.no_silent_downcasting' is deprecated", "ignore:The copy keyword is deprecated")


def add(shelf: Shelf, name: str, at: int, size: int = 10):
    folder = shelf.new_folder()
    folder.mkdir(parents=True)
    (folder / name).write_bytes(bytes(size))
    os.utime(folder / name, (at, at))
    return folder / name


def test_the_newest_are_first_and_others_are_no_pictures(tmp_path):
    shelf = Store(tmp_path).shelf(None, "")
    folder = tmp_path / "2001-02-03" / "101112-abcd"
    folder.mkdir(parents=True)
    for at, name in enumerate(("b.png", "a.png", "c.txt")):
        (folder / name).touch()
        os.utime(folder / name, (at, at))
    new = add(shelf, "d.png", 5)
    (tmp_path / "link.png").symlink_to(new)
    for name in (".hidden", "users", "visitors"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "e.png").touch()
    assert [path.name for path in shelf.paths()] == ["d.png", "a.png", "b.png"]
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}/\d{6}-[0-9a-f]{4}/d\.png", new.relative_to(tmp_path).as_posix())


def test_deleting_takes_empty_folders_along_and_nothing_else(tmp_path):
    shelf = Store(tmp_path).shelf(None, "")
    picture, other = add(shelf, "a.png", 0), tmp_path / "users" / "ann" / "a.png"
    other.parent.mkdir(parents=True)
    other.touch()
    for path in (other, tmp_path / "a.txt", tmp_path.parent / "a.png", picture.parent / ".." / ".." / ".." / "a.png"):
        with pytest.raises(InputError, match="this picture is not yours"):
            shelf.delete([picture, path])
    assert shelf.paths() == [picture]
    shelf.delete([picture])
    assert {path.name for path in tmp_path.iterdir()} == {HIDDEN, "users"} and shelf.paths() == []


def test_a_deleted_picture_is_not_served(tmp_path):
    shelf = Store(tmp_path).shelf(None, "")
    shelf.delete([add(shelf, "a.png", 0)])
    (deleted,) = tmp_path.rglob("*.png")
    assert not shelf.holds(deleted)


def test_owners_are_apart_whatever_their_names(tmp_path):
    store = Store(tmp_path, quota=100)
    owners = [("ann", ""), ("..", ""), ("a/b", ""), (None, "x"), (None, "y"), (None, "..")]
    pictures = [add(store.shelf(*owner), "a.png", 0) for owner in owners]
    for owner, own in zip(owners, pictures, strict=True):
        shelf = store.shelf(*owner)
        assert shelf.paths() == [own]
        assert own.resolve().relative_to(tmp_path).parts[0] in ("users", "visitors")
        assert [shelf.holds(path.resolve()) for path in pictures] == [path == own for path in pictures]


def test_the_quota(tmp_path):
    shelf = Store(tmp_path, quota=100).shelf("ann", "")
    picture = add(shelf, "a.png", 0, size=100)
    with pytest.raises(InputError, match="your pictures fill your quota of 0 MiB; delete some in History"):
        shelf.new_folder()
    assert Store(tmp_path).shelf("ann", "").new_folder()
    shelf.delete([picture])
    assert shelf.size() == 100  # in the bin
    shelf.new_folder()
    assert shelf.size() == 0


def test_all_visitors_together_have_a_quota(tmp_path):
    store = Store(tmp_path, quota=100, visitors=150)
    picture, _ = (add(store.shelf(None, token), "a.png", 0, size=80) for token in ("x", "y"))
    store = Store(tmp_path, quota=100, visitors=150)
    with pytest.raises(InputError, match="the pictures of all visitors fill their quota of 0 MiB; delete some"):
        store.shelf(None, "z").new_folder()
    assert store.shelf("ann", "").new_folder()
    store.shelf(None, "x").delete([picture])
    assert store.shelf(None, "z").new_folder()


def test_temporary_files_of_killed_runs_go_and_those_of_living_ones_stay(tmp_path):
    store = Store(tmp_path, quota=100)
    runs = [store.shelf(*owner).new_folder() for owner in (("ann", ""), (None, "x"), (None, "y"))]
    for run in runs:
        run.mkdir(parents=True)
        temporaries._create(run).close()
    (runs[1] / "a.png").touch()
    with temporaries._create(runs[2]) as living:
        remove_abandoned(store)
        assert list(runs[2].iterdir()) == [Path(living.name)]
    assert not runs[0].exists() and [path.name for path in runs[1].iterdir()] == ["a.png"]


def draw(page, seed: int, steps: int = 1) -> None:
    assert "Drew 1 picture" in page.draw(Steps=steps, Seed=seed, Pictures=1)


def history(page, number: int = 1) -> list:
    """Return the status and the (caption, address) of each picture on a page of History."""
    event = page.event("history-tab", "select")
    status, *_, gallery = page.call(event, [None, number])["output"]["data"][:4]
    pictures = gallery["value"] if isinstance(gallery, dict) else gallery
    return [status, [(each["caption"], each["image"]["url"]) for each in pictures]]


@pytest.mark.slow
@pytest.mark.filterwarnings(*GRADIO_WARNINGS)
def test_history_is_there_after_a_restart_and_is_paged_and_deleted(shared, serve, visit_at, tmp_path):
    with serve(shared, Limits(), outputs=tmp_path) as address:
        draw(visit_at(address), seed=5)
    (kept,) = Store(tmp_path).shelf(None, "").paths()
    folder = tmp_path / "2001-02-03" / "101112-abcd"
    folder.mkdir(parents=True)
    for number in range(PAGE_SIZE):
        (folder / f"{number}.png").write_bytes(kept.read_bytes())
        os.utime(folder / f"{number}.png", (number, number))
    with serve(shared, Limits(), outputs=tmp_path) as address:
        page = visit_at(address)
        status, pictures = history(page)
        assert f"{PAGE_SIZE + 1} pictures, newest first; page 1 of 2" in status
        assert pictures[0][0].endswith(", seed 5") and len(pictures) == PAGE_SIZE
        assert page.http.get(pictures[0][1]).content == kept.read_bytes()
        assert len(history(page, 2)[1]) == 1 and len(history(page, 99)[1]) == 1
        history(page)
        clicked = page.event("history", "select")
        body = {"data": [None] * len(clicked["inputs"]), "fn_index": clicked["id"], "session_hash": page.session_hash}
        body["event_data"] = {"index": 0, "value": None}
        assert page.http.post("/gradio_api/queue/join", json=body).status_code == 200
        assert any(each["msg"] == "process_completed" and each["success"] for each in page.messages())
        page.call(page.event("delete", "click"), [None, 1, None])
        assert not kept.exists() and f"{PAGE_SIZE} pictures" in history(page)[0]
        page.call(page.event("undo", "click"), [None, 1])
        assert kept.exists() and f"{PAGE_SIZE + 1} pictures" in history(page)[0]
        page.call(page.event("undo", "click"), [None, 1])  # nothing is left to undo
        assert f"{PAGE_SIZE + 1} pictures" in history(page)[0]
        (tmp_path / "users").mkdir()
        for file in (tmp_path / "notes.txt", tmp_path / "users" / "a.png", tmp_path / HIDDEN / "index.sqlite"):
            file.touch()
            assert page.http.get(f"/gradio_api/file={file}").status_code == 403


@pytest.mark.slow
@pytest.mark.filterwarnings(*GRADIO_WARNINGS)
def test_pictures_of_the_api_are_in_history_too(shared, serve, visit_at, tmp_path):
    with serve(shared, Limits(), outputs=tmp_path) as address:
        client = Client(address, verbose=False, download_files=tmp_path / "users")
        (path,) = client.predict(seed=8, num_images=1, steps=1, api_name="/generate")
        client.close()
        ((caption, _),) = history(visit_at(address))[1]
        assert caption.endswith(", seed 8")
        (kept,) = Store(tmp_path).shelf(None, "").paths()
        assert Path(path).read_bytes() == kept.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings(*GRADIO_WARNINGS)
def test_pictures_of_users_are_their_own_on_every_browser(shared, serve, visit_at, tmp_path):
    users = Users(["ann:a", "bob:b"], "test")
    with serve(shared, Limits(), outputs=tmp_path, users=users) as address:
        ann, ann_at_home, bob = (visit_at(address, login) for login in (("ann", "a"), ("ann", "a"), ("bob", "b")))
        draw(ann, seed=5)
        ((_, url),) = history(ann_at_home)[1]
        assert history(bob)[1] == []
        assert [page.http.get(url).status_code for page in (ann, ann_at_home, bob)] == [200, 200, 403]


@pytest.mark.filterwarnings(*GRADIO_WARNINGS)
def test_pictures_of_browsers_are_their_own_within_quotas(shared, serve, visit_at, monkeypatch):
    monkeypatch.setattr("fastdiff.ui.serving.store.RECOUNT", 0.0)
    with serve(shared, Limits(kept=1, visitors=20_000), allow_hosts=["page.example.org"]) as address:
        page, other = visit_at(address), visit_at(address)
        draw(page, seed=5)
        event = page.event("generate", "click")
        full = page.call(event, page.inputs(event, Steps=1))
        assert "your pictures fill your quota of 0 MiB; delete some in History" in str(full["output"])
        draw(other, seed=6)
        third = visit_at(address)
        full = third.call(event, third.inputs(event, Steps=1))
        assert "the pictures of all visitors fill their quota of 0 MiB" in str(full["output"])
        ((_, url),) = history(page)[1]
        assert page.http.get(url).status_code == 200
        disguises = url.replace("/file=", "/file/"), url.replace("visitors", "users/../visitors"), unquote(url)
        for name in (url, *disguises):
            assert other.http.get(name).status_code == 403, name
            assert other.http.head(name).status_code in (403, 405)
        other.http.cookies.clear()
        assert other.http.get(url).status_code == 403


def test_an_outputs_folder_that_cannot_be(shared, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to .*file \(it is not a folder\); choose another place with "):
        serving(shared, Limits(), outputs=tmp_path / "file").__enter__()
