"""Edits of the JSON and text files of a model folder, including tokenizers."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.values import JSON, OUTSIDE

GONE = "gone"  # deletes a JSON value


def replace(path: Path, content: bytes | str) -> None:
    """Replace a file without changing its other hard links."""
    path.unlink()
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))


def option(folder: Path, file: str, key: str, value: str) -> None:
    """Set an option in a JSON file to a value: the name of a value in JSON, or literal text."""
    path = folder / file
    content = json.loads(path.read_bytes())
    replace(path, json.dumps({name: each for name, each in content.items() if name != key} | {key: "@value@"}))
    replace(path, path.read_text("utf-8").replace('"@value@"', JSON.get(value, value)))


def no_option(folder: Path, file: str, key: str) -> None:
    content = json.loads((folder / file).read_bytes())
    content.pop(key, None)
    replace(folder / file, json.dumps(content))


def within(folder: Path, file: str, way: str, value: str) -> None:
    """Replace a value deep inside a JSON file, or delete it.

    `way` is the path: for each list or object on it the number of a member, modulo their count, separated by dots.
    """
    top = [json.loads((folder / file).read_bytes())]
    holder: Any = top
    place: Any = 0
    for number in map(int, way.split(".")):
        inside = holder[place]
        if not isinstance(inside, list | dict) or not inside:
            break
        place = list(inside)[number % len(inside)] if isinstance(inside, dict) else number % len(inside)
        holder = inside
    if value == GONE:
        del holder[place]
    else:
        holder[place] = "@value@"
    replace(folder / file, json.dumps(top[0]).replace('"@value@"', JSON.get(value, value)))


def whole(folder: Path, file: str, value: str) -> None:
    """Replace a whole JSON file with another value."""
    replace(folder / file, JSON[value])


def shard(folder: Path, file: str, name: str) -> None:
    """Make an index name another file for its first tensor."""
    content = json.loads((folder / file).read_bytes())
    places = content.get("weight_map")
    if isinstance(places, dict) and places:
        places[next(iter(places))] = SHARDS[name]
    replace(folder / file, json.dumps(content))


SHARDS = {
    "outside": f"{OUTSIDE}.safetensors",
    "absolute": "/etc/passwd",
    "folder": "../unet",
    "itself": ".",
    "nothing": "",
    "backslash": "..\\w",
    "NUL": "a\0b",
    "long": "x" * 10_000,
    "surrogate": "\ud800",
    "config": "config.json",
    "number": 7,
    "null": None,
}


def encoded(folder: Path, file: str, how: str) -> None:
    """Write a file's text in another encoding."""
    replace(folder / file, ENCODINGS[how]((folder / file).read_text("utf-8")))


ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "UTF-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-32": lambda text: text.encode("utf-32"),
    "Latin-1": lambda text: text.encode("latin-1", "replace"),
    "CR LF": lambda text: text.replace("\n", "\r\n").encode(),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "a surrogate": lambda text: text.encode() + b"\xed\xa0\x80",
    "NUL": lambda text: text.encode() + b"\0",
    "spaces": lambda text: (" \n\t" * 100_000 + text).encode(),
    "twice": lambda text: (text + text).encode(),
    "gzip": lambda text: gzip.compress(text.encode(), mtime=0),
}


def vocabulary(folder: Path, file: str, how: str) -> None:
    """Change the vocabulary in a vocab.json or a tokenizer.json."""
    path = folder / file
    content = json.loads(path.read_bytes())
    if path.name == "tokenizer.json":
        content["model"]["vocab"] = VOCABULARIES[how](content["model"]["vocab"])
    else:
        content = VOCABULARIES[how](content)
    replace(path, json.dumps(content))


Ids = dict[str, int]
_ODD_IDS: dict[str, Any] = {"below 0": -1, "fraction": 1.5, "text": "1", "null": None, "true": True, "list": [1]}
_ODD_IDS |= {"2^20": 2**20, "2^32": 2**32, "2^63": 2**63}
_ODD_TOKENS = {"of nothing": "", "of a surrogate": "\ud800", "of NUL": "a\0", "of lines": "a\nb", "long": "x" * 100_000}


def _only(ids: Ids, is_left: Callable[[str], bool]) -> Ids:
    return {token: number for token, number in ids.items() if is_left(token)}


VOCABULARIES: dict[str, Callable[[Ids], dict[str, Any]]] = {
    **{f"an id: {how}": lambda ids, value=value: {**ids, "the</w>": value} for how, value in _ODD_IDS.items()},
    **{f"a token {how}": lambda ids, token=token: {**ids, token: len(ids)} for how, token in _ODD_TOKENS.items()},
    "a gap": lambda ids: {**ids, "the</w>": len(ids) + 7},
    "an id twice": lambda ids: {**ids, "the</w>": ids["of</w>"]},
    "no letters": lambda ids: _only(ids, lambda token: len(token.removesuffix("</w>")) > 1),
    "no words": lambda ids: _only(ids, lambda token: len(token) == 1 or token.startswith("<|")),
    "no start and no end": lambda ids: _only(ids, lambda token: not token.startswith("<|")),
    "no letters and no end": lambda ids: _only(ids, lambda token: len(token) > 1 and token != "<|endoftext|>"),
    "backwards": lambda ids: dict(zip(ids, reversed(ids.values()), strict=True)),
    "one token": lambda ids: {"<|endoftext|>": 0},
    "empty": lambda ids: {},
    "one more": lambda ids: {**ids, "more": len(ids)},
    "many more": lambda ids: {**ids, **{f"more{i}": len(ids) + i for i in range(100_000)}},
}


def merges(folder: Path, file: str, how: str) -> None:
    """Change the merges in a merges.txt, or in a tokenizer.json, where they become strings as in old files."""
    path = folder / file
    if path.name == "tokenizer.json":
        content = json.loads(path.read_bytes())
        pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
        content["model"]["merges"] = MERGES[how](pairs)
        replace(path, json.dumps(content))
    else:
        first, *pairs = path.read_text("utf-8").split("\n")
        replace(path, "\n".join([first, *MERGES[how](pairs)]))


MERGES: dict[str, Callable[[list[str]], list[str]]] = {
    "none": lambda lines: [],
    "twice": lambda lines: lines * 2,
    "backwards": lambda lines: lines[::-1],
    "a comment": lambda lines: ["# made by hand", *lines],
    "blank lines": lambda lines: ["", " ", *lines],
    "tabs": lambda lines: [line.replace(" ", "\t") for line in lines],
    "two spaces": lambda lines: [line.replace(" ", "  ") for line in lines],
    "one word": lambda lines: [*lines[:3], "t"],
    "three words": lambda lines: [*lines[:3], "t h e</w>"],
    "unknown words": lambda lines: ["no such", *lines],
    "words of nothing": lambda lines: [*lines, " the</w>"],
    "a long line": lambda lines: [*lines, f"{'t' * 10**6} h"],
    "many lines": lambda lines: [*lines, *lines[:1] * 200_000],
    "a surrogate": lambda lines: [*lines, "\ud800 t"],
    "NUL": lambda lines: [*lines, "t \0"],
}
