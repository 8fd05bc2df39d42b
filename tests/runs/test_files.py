"""File names, the checks before drawing, and writes that leave a whole file or none."""

import errno
import itertools
import os
import sys
from pathlib import Path

import pytest

from fastdiff.errors import InputError
from fastdiff.requests.completion import Cell
from fastdiff.runs import files

UNLABELLED = Cell(1, None, None)


@pytest.mark.parametrize(
    ("out", "subject", "expected"),
    [
        ("pictures", "label", "pictures/{label}-{seed}.png"),
        ("pictures", "prompt", "pictures/{prompt}-{seed}.png"),
        ("pictures/", None, "pictures/{seed}.png"),
        ("folder.png/", None, "folder.png/{seed}.png"),
        ("a/{label}/{seed:06d}.png", "label", "a/{label}/{seed:06d}.png"),
        ("one.PNG", None, "one.PNG"),
        ("v1.5", None, "v1.5/{seed}.png"),
        ("{{x}}.png", None, "{{x}}.png"),
    ],
    ids=["folder", "prompts", "slash", "folder-like-a-file", "pattern", "file", "folder-with-a-dot", "meant-braces"],
)
def test_out_becomes_a_pattern(out, subject, expected):
    assert files.as_pattern(out, subject) == expected


def test_an_existing_folder_is_taken_as_it_is_named(tmp_path):
    folder = tmp_path / "{seed}.png"
    folder.mkdir()
    pattern = files.as_pattern(str(folder), None)
    assert files.picture_paths(pattern, [UNLABELLED], [None]) == [folder / "1.png"]


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("", "is not a path"),
        ("a\0b", "is not a path"),
        ("{name}.png", "unknown field"),
        ("{seed.__class__}.png", "unknown field"),
        ("{seed!r}.png", "unknown field"),
        ("{}.png", "unknown field"),
        ("{seed:1000000000}.png", "unknown field"),
        ("{label:>9}.png", "unknown field"),
        ("{seed.png", "is not a valid pattern"),
        ("}.png", "is not a valid pattern"),
        ("{seed}", "is not the name of a PNG"),
        ("x.jpg", "is not the name of a PNG"),
        ("{label}.png", "has {label}, but these pictures have no label; leave it out"),
        ("{prompt}.png", "has {prompt}, but these pictures have no prompt; leave it out"),
    ],
)
def test_what_is_not_a_pattern_is_refused(out, reason):
    with pytest.raises(InputError, match=reason):
        files.as_pattern(out, None)


def test_paths_names_every_picture_in_order(tmp_path):
    cells = [Cell(1, 0, "a b"), Cell(2, 0, "a b"), Cell(1, 4, 4)]
    paths = files.picture_paths(f"{tmp_path}/new/{{label}}-{{seed:03d}}.png", cells, ["a-b", "a-b", "class4"])
    assert [path.name for path in paths] == ["a-b-001.png", "a-b-002.png", "class4-001.png"]
    files.check(paths)
    assert not (tmp_path / "new").exists(), "a check creates nothing"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("{seed}.png", ["cat", "dog"]), ("{label}.png", ["STRASSE", "straße"])],
    ids=["one-name-for-two", "names-that-differ-in-case-only"],
)
def test_paths_refuses_two_pictures_of_one_name(tmp_path, pattern, names):
    with pytest.raises(InputError, match="two pictures have the name"):
        files.picture_paths(f"{tmp_path}/{pattern}", [Cell(1, 0, "x"), Cell(1, 1, "y")], names)


def test_names_are_numbered_from_two_on():
    names = itertools.islice(files.numbered(Path("a/b.c.PNG")), 3)
    assert [str(name) for name in names] == ["a/b.c.PNG", "a/b.c-2.PNG", "a/b.c-3.PNG"]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("file/1.png", "file .it is not a folder."),
        ("file/deeper/1.png", "file .it is not a folder."),
        ("folder.png", "is a folder"),
        ("a" * 300 + ".png", "too long"),
        ("new/" + "a" * 300 + "/1.png", "too long"),
        ("new/" * 2000 + "1.png", "too long"),
        ("/proc/fastdiff/1.png", "cannot write to /proc"),
    ],
    ids=[
        "file-as-folder",
        "file-above-the-folder",
        "folder-as-file",
        "long-name",
        "long-folder",
        "long-path",
        "no-place-for-files",
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, where, reason):
    if where.startswith("/proc") and sys.platform != "linux":
        pytest.skip("/proc is Linux")
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match=reason):
        files.check([tmp_path / where])
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.png"]


@pytest.mark.skipif(os.name != "posix", reason="Windows has such names")
def test_a_name_that_the_locale_has_no_letters_for(tmp_path):
    """A name from a prompt or label, in a locale other than UTF-8. No locale can encode half a surrogate pair."""
    with pytest.raises(InputError, match=r"file names are .* in this locale.*; set a UTF-8 locale, or choose"):
        files.check([tmp_path / "\ud800.png"])


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="permission bits do not bind root")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        files.check([tmp_path / "1.png"])


@pytest.mark.parametrize("overwrite", [False, True])
def test_write_makes_folders_and_leaves_only_the_file(tmp_path, overwrite):
    path = tmp_path / "a" / "b" / "1.png"
    files.write(path, b"data", overwrite)
    assert path.read_bytes() == b"data"
    assert os.listdir(path.parent) == ["1.png"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_write_never_replaces_a_file_that_appeared_since_the_check(tmp_path):
    path = tmp_path / "1.png"
    path.write_bytes(b"other")
    with pytest.raises(OSError, match="appeared during the drawing and was kept"):
        files.write(path, b"mine", overwrite=False)
    assert path.read_bytes() == b"other" and os.listdir(tmp_path) == ["1.png"]
    files.write(path, b"mine", overwrite=True)
    assert path.read_bytes() == b"mine"


def test_write_is_exclusive_without_hard_links_too(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    files.write(tmp_path / "1.png", b"mine", overwrite=False)
    with pytest.raises(OSError, match="was kept"):
        files.write(tmp_path / "1.png", b"second", overwrite=False)
    assert (tmp_path / "1.png").read_bytes() == b"mine" and os.listdir(tmp_path) == ["1.png"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(OSError, match=r"cannot write .*1\.png \(No space left on device\); free space"):
        files.write(tmp_path / "1.png", b"data", overwrite=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["sheet", "sheet.jpg", "", "a\0.png"])
def test_a_grid_is_a_png(name):
    with pytest.raises(InputError, match="is not the name of a PNG"):
        files.grid_path(name)
