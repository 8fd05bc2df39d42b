"""JSON files: what is read, what is refused, and how a dataclass is made of one."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from fastdiff.checkpoints.json_files import from_mapping, read_json
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
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "more than 20 digits", id="more-digits-than-an-int-may-have"),
        pytest.param(b'{"a": -1' + b"0" * 400 + b"}", "more than 20 digits", id="beyond-any-float"),
        pytest.param(b" " * (2**23 + 1), "more than the 8 MB", id="giant"),
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


@dataclass(frozen=True)
class Options:
    SWITCHED_OFF: ClassVar[Mapping[str, Any]] = {"upcast": False}
    width: int
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        if self.width < 1:
            raise InputError("width: give at least 1")


def test_lists_become_tuples_and_bookkeeping_is_passed_over():
    given = {"_class_name": "Options", "_diffusers_version": "0.42.1", "width": 3, "sizes": [1, 2], "upcast": False}
    assert from_mapping(Options, given, "here") == Options(3, (1, 2))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        pytest.param({"width": 1, "b": 1, "a": 2}, "here: unknown option a, b; Options has sizes, width", id="unknown"),
        pytest.param({"width": 1, "upcast": True}, "here: upcast True is not supported", id="switched-off"),
        pytest.param({"width": 0}, "here: width: give at least 1", id="refused-by-the-class"),
        pytest.param({"width": "1"}, "here: an option is of the wrong type", id="wrong-type"),
        pytest.param({}, "here: an option is of the wrong type", id="missing"),
    ],
)
def test_bad_options_are_one_line_that_names_the_source(mapping, message):
    with pytest.raises(InputError) as error:
        from_mapping(Options, mapping, "here")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
