"""Cases of the page's tabs: pictures of other tools that are dropped, and clicks in History."""

import io
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.fuzz.text_edits import ENCODINGS, GONE
from tests.fuzz.values import JSON, PNG_KEYS
from tests.requests import foreign_pictures

DROPPED_NAME = "dropped"
TOOLS = ("A1111", "COMFYUI", "INVOKEAI", "FOOOCUS", "NOVELAI")
NUMBER = re.compile(r"\d+\.?\d*")
PLACED = {"NaN": "nan", "digits": "7" * 5000, "below 0": "-1", "large": "1e400", "text": "x", "nothing": "", "0": "0"}
PLACED |= {"10^18": "1" + "0" * 18, "list": "[1]", "object": '{"a": 1}', "null": "null", "fraction": "1.9"}
TEXTS: dict[str, Callable[[str], str]] = {
    "whole": lambda text: text,
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "without its end": lambda text: text[:-1],
    "twice": lambda text: text * 2,
    "many times": lambda text: text * 2000,
    "5 MB": lambda text: text + "x" * 5_000_000,
    "lines": lambda text: text.replace(" ", "\n"),
    "surrogates": lambda text: text.replace("a ", "\\ud800 "),
    "NUL": lambda text: text.replace("a ", "\0\\u0000 "),
    "markup": lambda text: text.replace("a ", "<script>alert(1)</script>&lt; "),
    "escapes": lambda text: text.replace("a ", "\x1b[31m\\u001b\r\b "),
    "brackets": lambda text: text.replace("a ", "(" * 5000 + "[" * 5000),
    **{f"JSON: {name}": lambda text, name=name: JSON[name] for name in JSON},
    **{f"numbers: {name}": lambda text, value=value: NUMBER.sub(value, text) for name, value in PLACED.items()},
    **{f"texts: {name}": lambda text, name=name: re.sub('"[^"]*"(?!:)', lambda _: JSON[name], text) for name in JSON},
}
FILES: dict[str, Callable[[bytes], bytes]] = {
    "whole": lambda data: data,
    "no end": lambda data: data[:-20],
    "half": lambda data: data[: len(data) // 2],
    "a start": lambda data: data[:40],
    "more": lambda data: data + b"\x5a" * 4096,
    "bits": lambda data: bytes(byte ^ (place % 97 == 50) for place, byte in enumerate(data)),
    "lengths": lambda data: data.replace(b"EXIF", b"EXIF\xff").replace(b"tEXt", b"\xff\xff"),
    "offsets": lambda data: data.replace(b"\x92\x86\x00\x07", b"\x92\x86\x00\x04").replace(b"\x87\x69", b"\x87\x68"),
    "loops": lambda data: data.replace(b"MM\x00*\x00\x00\x00\x08", b"MM\x00*\x00\x00\x00\x00"),
}
FORMS = ("PNG", "PNG of zTXt", "PNG of iTXt", "JPEG", "WEBP")
CODINGS = {**ENCODINGS, "UTF-16 big-endian": lambda text: text.encode("utf-16-be"), "usual": lambda text: text.encode()}
PREFIXES = {"UNICODE": b"UNICODE\0", "ASCII": b"ASCII\0\0\0", "JIS": b"JIS\0\0\0\0\0", "none": b"", "short": b"UNI"}

_EVENTS = """show filter refresh previous following favourite delete restore select_several select_page pick pick
    write_zip write_grid"""
EVENTS = [f"HistoryTab.{name}" for name in _EVENTS.split()]
EVENTS += ["Panel.follow.<locals>.show", "Panel.follow.<locals>.show", "Panel.follow.<locals>.change", "DrawTab.use"]
SENT: dict[str, Any] = {  # values of fields, and the places of clicked pictures
    **{str(number): number for number in (0, 1, 2, 3, -1, 99, 2**31, 2**63, 10**400, 1.5, -0.0)},
    **{"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf, "null": None, "true": True, "false": False},
    **{text: text for text in ("", "x", "seed 3", "Grid", "One", "%_'\"--", "seed 1e400", "eta:nan", "2001-02-03")},
    **{"NUL": "a\0b", "surrogate": "\ud800", "long": "x" * 200_000, "digits": f"seed {'7' * 5000}"},
    **{"list": [1], "object": {"a": 1}, "two": [0, 0], "deep": [[[[]]]]},
}
_FILE = ("gone", "half", "bits", "text", "empty", "folder", "link", "pipe")
_FOLDER = ("gone", "text", "link", "pipe", "empty")
ACCIDENTS = {  # what may happen to files while History is open
    "index": (*_FILE, "locked"),
    "favourites": (*_FILE, "JSON", "deep JSON"),
    "picture": _FILE,
    "bin": _FOLDER,
    "hidden folder": _FOLDER,
    "run": _FOLDER,
    "shelf": _FOLDER,
    "settings": [f"{key}={value}" for key in PNG_KEYS for value in (*JSON, GONE)],
}


def write_dropped(folder: Path, form: str, tool: str, text: str, coding: str, prefix: str, file: str) -> None:
    """Write a picture as a tool writes it, but with a damaged text, another encoding, or a damaged file."""
    texts = {name: TEXTS[text](value) for name, value in getattr(foreign_pictures, tool).items()}
    if coding == "usual" and form in ("JPEG", "WEBP"):
        coding = "UTF-16 big-endian"
    parts = {name: CODINGS[coding](value) for name, value in texts.items()}
    (folder / DROPPED_NAME).write_bytes(FILES[file](_picture(form, parts, PREFIXES[prefix])))


def _picture(form: str, parts: dict[str, bytes], prefix: bytes) -> bytes:
    file, picture = io.BytesIO(), Image.new("RGB", (8, 8))
    if form.startswith("PNG"):
        info = PngInfo()
        for name, data in parts.items():
            kind = form.partition(" of ")[2] or "tEXt"
            head = {"tEXt": b"\0", "zTXt": b"\0\0", "iTXt": b"\0\0\0\0\0"}[kind]
            info.add(kind.encode(), name.encode() + head + (zlib.compress(data) if kind == "zTXt" else data))
        picture.save(file, "PNG", pnginfo=info)
    else:
        exif = Image.Exif()
        comment = prefix + b"".join(parts.values())
        exif.get_ifd(0x8769)[0x9286] = comment[:60_000] if form == "JPEG" else comment  # JPEG holds no more
        picture.save(file, form, exif=exif)
    return file.getvalue()


Drawn = tuple[tuple[tuple[str, ...], ...], str, str, tuple[tuple[str, str], ...]]  # edits, door, what, options


def dropped() -> st.SearchStrategy[Drawn]:
    """Return pictures of other tools, damaged in one or two ways, dropped onto the page."""
    sound = [st.just(each) for each in ("whole", "usual", "UNICODE", "whole")]
    odd = [st.sampled_from(sorted(each)) for each in (TEXTS, CODINGS, PREFIXES, FILES)]
    ways = st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 3]), min_size=1, max_size=2, unique=True)
    damage = ways.flatmap(lambda chosen: st.tuples(*(odd[i] if i in chosen else sound[i] for i in range(len(odd)))))
    form, tool = st.sampled_from(FORMS), st.sampled_from(sorted(TOOLS))
    edit = st.tuples(form, tool, damage).map(lambda drawn: ("write_dropped", *drawn[:2], *drawn[2]))
    return dropping(edit)


def dropping(edit: st.SearchStrategy[tuple[str, ...]]) -> st.SearchStrategy[Drawn]:
    """Return pictures that an edit writes, dropped onto the page."""
    model = st.sampled_from(["emoji-sd", "emoji64"]).map(lambda name: (("Model", name),))
    return st.tuples(st.tuples(edit), st.just("tab"), st.just("dropped"), model)


def clicks() -> st.SearchStrategy[Drawn]:
    """Return events of History with odd values, and things that happen to its folder meanwhile."""
    event = st.tuples(st.sampled_from(EVENTS), st.sampled_from([*("0", "1") * 6, *sorted(SENT)]))
    of_name = {name: st.tuples(st.just(name), st.sampled_from(ways)) for name, ways in ACCIDENTS.items()}
    accident = st.sampled_from([*ACCIDENTS, *["settings"] * 6]).flatmap(of_name.__getitem__)
    steps = st.lists(event | event | accident, min_size=3, max_size=8).map(tuple)
    return st.tuples(st.just(()), st.just("tab"), st.just("history"), steps)
