"""JSON files: what is read, and what is an error."""

import math
import os

import pytest

from fastdiff.checkpoints.json_files import read_json
from fastdiff.errors import InputError


def test_an_object_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"name": "Grün"}', encoding="utf-8")
    assert read_json(path) == read_json(str(path)) == {"name": "Grün"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        pytest.param(b"{", "not readable JSON", id="truncated"),
        pytest.param(b"", "not readable JSON", id="empty"),
        pytest.param(b"\xff\xfe", "not readable JSON", id="no-text"),
        pytest.param(b"[" * 100_000, "not readable JSON", id="nested-without-end"),
        pytest.param(b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "more than 32", id="nested-deeper-than-any-config"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "more than 31 digits", id="more-digits-than-an-int-may-have"),
        pytest.param(b'{"a": -1' + b"0" * 400 + b"}", "more than 31 digits", id="beyond-any-float"),
        pytest.param(b" " * (2**24 + 1), "more than the 16 MB", id="giant"),
        pytest.param(b"[1]", "holds a list", id="list"),
        pytest.param(b"null", "holds a NoneType", id="null"),
        pytest.param(None, "does not exist", id="absent"),
    ],
)
def test_anything_else_is_one_line_that_names_the_file(tmp_path, content, named):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_json(path)
    assert named in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_what_diffusers_nests_and_counts_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": [[1, {"b": 18446744073709551615}]], "c": -Infinity}')
    assert read_json(path) == {"a": [[1, {"b": 2**64 - 1}]], "c": -math.inf}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes and devices among the files")
@pytest.mark.parametrize("name", ["pipe", "link-to-a-pipe", "device", "folder"])
def test_what_is_no_file_is_refused_without_reading_it(tmp_path, name):
    paths = {name: tmp_path / name for name in ("pipe", "link-to-a-pipe", "folder")} | {"device": "/dev/zero"}
    os.mkfifo(paths["pipe"])
    paths["link-to-a-pipe"].symlink_to(paths["pipe"])
    paths["folder"].mkdir()
    with pytest.raises(InputError, match=f"{paths[name]} is not a regular file"):
        read_json(paths[name])


def test_links_are_followed(tmp_path):
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to(tmp_path / "blob")
    assert read_json(tmp_path / "config.json") == {"a": 1}
