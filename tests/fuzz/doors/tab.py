"""The page's tabs as a door: pictures of other tools and start pictures dropped onto Draw, and clicks in History."""

import base64
import functools
import io
import json
import os
import secrets
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import gradio as gr

from fastdiff.errors import InputError
from fastdiff.requests import foreign
from fastdiff.ui.history.bin import HIDDEN
from fastdiff.ui.inputs.mask import mask_at
from fastdiff.ui.parts.request import Limits
from tests.fuzz import edits
from tests.fuzz.doors.outcomes import Options, Outcome, guarded
from tests.fuzz.named import pictures
from tests.fuzz.tabs import DROPPED_NAME, SENT
from tests.ui.history.unserved import UnservedPage, upload

ALERT, STATUS = 'role=\\"alert\\"', 'role=\\"status\\"'
UPLOAD = "Drop a picture anywhere to load its settings"
RECORDS = ((), ("prompt", "long text"), ("seed", "[1]"), ("label", "lines"))  # settings of the pictures on the shelf


_unserved = functools.cache(lambda: UnservedPage(Path("unused")))


def call(folder: Path, what: str, options: Options) -> Outcome:
    """Drop the picture of the folder, start from it, or click in History and change its folder meanwhile."""
    os.environ["GRADIO_TEMP_DIR"] = str(folder.parent / "out")
    try:
        return {"dropped": _drop, "start": _start}.get(what, _click)(folder, options)
    finally:
        del os.environ["GRADIO_TEMP_DIR"]


@guarded
def _drop(folder: Path, options: Options) -> list[str]:
    found = [path for name in (DROPPED_NAME, edits.PNG_NAME) if (path := folder / name).exists()]
    file = upload(found[0].read_bytes() if found else b"", "a picture.png")
    with mock.patch.object(foreign.subprocess, "run", _in_this_process):
        said = _page(folder).press("DrawTab.restore", {UPLOAD: file, **dict(options)})
    if ALERT in said:
        raise InputError("refused")
    return [] if STATUS in said else ["said nothing"]


@guarded
def _start(folder: Path, options: Options) -> list[str]:
    """Start from the folder's picture, paint on it, let it be what was painted, and find its edges."""
    path = folder / pictures.NAME
    data = path.read_bytes() if path.exists() else b""
    file = upload(data, path.name)
    page, start = _page(folder), {"Start picture": file, "Paint a mask": True}
    said = page.press("Starting.begin", start) + page.press("Starting.paint", start)
    control = {"Control picture": file, "Model": "emoji-sd", **dict(options)}
    said += page.press("Starting.begin_control", control)
    if ALERT not in page.press("Starting.begin_image", {"Image prompt": file, "Model": "emoji-sd"}):
        return ["an image prompt of a model without IP-Adapters"]
    edges = page.press("Starting.preview", control)
    if ("<figure" in edges) == (ALERT in edges):
        return ["neither a control picture nor one line"]
    try:
        mask_at(f"data:image/png;base64,{base64.b64encode(data).decode()}", Limits().uploads)
    except InputError as error:
        if "\n" in str(error):
            return ["more than one line"]
    if ALERT in said:
        raise InputError("refused")
    return [] if STATUS in said else ["said nothing"]


def _in_this_process(command: list[str], **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run `python -m fastdiff.requests.foreign` here, where the time and memory are watched."""
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            print(json.dumps(foreign.parse(command[-2], int(command[-1]))))
    except Exception:
        return subprocess.CompletedProcess(command, 1)
    return subprocess.CompletedProcess(command, 0, output.getvalue().encode())


def _page(folder: Path) -> UnservedPage:
    page = _unserved()
    page.visit(folder.parent / "shelf")
    return page


@guarded
def _click(folder: Path, options: Options) -> list[str]:
    shelf, is_refused = folder.parent / "shelf", False
    for number, edit in enumerate(RECORDS):
        (shelf / "run").mkdir(parents=True, exist_ok=True)
        edits.settings(folder, *(edit or ("seed", "3")))
        shutil.move(folder / edits.PNG_NAME, shelf / "run" / f"{number}.png")
    page = _page(folder)
    with ExitStack() as stack, mock.patch("fastdiff.ui.history.index.WAIT", 0.05):
        page.press("HistoryTab.show")
        for name, value in options:
            if name in HAPPENING:
                with suppress(OSError, sqlite3.Error):  # an earlier accident took the file
                    HAPPENING[name](shelf, value, stack)
            else:
                is_refused |= _press(page, name, SENT[value])
        page.press("HistoryTab.show")
    if is_refused:
        raise InputError("refused")
    return []


def _press(page: UnservedPage, event: str, value: Any) -> bool:
    """Call an event with a value in each field. Return whether it was refused."""
    try:
        return ALERT in page.press(event, dict.fromkeys(page.labels(event), value), index=value)
    except gr.Error:  # Gradio shows its line
        return True


def _replace(path: Path, how: str, stack: ExitStack) -> None:
    """Lock a file, or replace a file or folder with what `how` names."""
    if how == "locked":
        db = stack.enter_context(closing(sqlite3.connect(path, isolation_level=None)))
        db.execute("BEGIN EXCLUSIVE")
        return
    data = path.read_bytes() if path.is_file() else b""
    path.rename(Path(os.environ["GRADIO_TEMP_DIR"], secrets.token_hex(4)))
    if how == "half":
        path.write_bytes(data[: len(data) // 2])
    elif how == "bits":
        path.write_bytes(bytes(byte ^ (place % 97 == 50) for place, byte in enumerate(data)))
    elif how == "text":
        path.write_text("text")
    elif how == "JSON":
        path.write_text('["a", 1, {"b": NaN}]')
    elif how == "deep JSON":
        path.write_text("[" * 100_000)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(path.name)
    elif how == "pipe":
        os.mkfifo(path)


def _write_settings(shelf: Path, setting: str, stack: ExitStack) -> None:
    """Write another picture with an odd setting."""
    edits.settings(shelf, *setting.split("="))
    (shelf / edits.PNG_NAME).rename(shelf / f"{setting.partition('=')[0]}.png")


HAPPENING: dict[str, Callable[[Path, str, ExitStack], None]] = {
    "index": lambda shelf, how, stack: _replace(shelf / HIDDEN / "index.sqlite", how, stack),
    "favourites": lambda shelf, how, stack: _replace(shelf / HIDDEN / "favourites.json", how, stack),
    "bin": lambda shelf, how, stack: _replace(shelf / HIDDEN / "bin", how, stack),
    "hidden folder": lambda shelf, how, stack: _replace(shelf / HIDDEN, how, stack),
    "shelf": lambda shelf, how, stack: _replace(shelf, how, stack),
    "run": lambda shelf, how, stack: _replace(shelf / "run", how, stack),
    "picture": lambda shelf, how, stack: _replace(shelf / "run" / "0.png", how, stack),
    "settings": _write_settings,
}
