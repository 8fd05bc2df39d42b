"""Edits of a model folder: each is a name in EDITS and its words, so that a case is text and can be reproduced.

Most edits may or may not leave the folder usable. An edit that `must_be_refused` would change the picture, so drawing
must fail.
"""

import io
import json
import os
import socket
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fastdiff.checkpoints.json_files import MAX_BYTES
from fastdiff.requests import png
from tests.fuzz import pickles, text_edits
from tests.fuzz.named import controls, embeddings, hostile_files, loras, pictures
from tests.fuzz.named.controls import control_file, controlnet
from tests.fuzz.named.embeddings import embedding
from tests.fuzz.named.hostile_files import single
from tests.fuzz.named.image_prompts import ip_adapters
from tests.fuzz.named.image_prompts.ip_adapters import image_encoder, ip_adapter
from tests.fuzz.named.loras import caption_lora, lora
from tests.fuzz.named.pictures import picture
from tests.fuzz.tabs import write_dropped
from tests.fuzz.text_edits import GONE, replace
from tests.fuzz.values import JSON, PNG_RECORD

Edit = tuple[str, ...]
PNG_NAME = "from.png"
STYLES_NAME, STYLES_HEAD = "styles.csv", "name,prompt,negative_prompt"
# Edits that write a file
NEW_FILES = ("settings", "chunk", "styles", "write_dropped", "single", "embedding", "lora", "picture", "controlnet")
NEW_FILES += ("ip_adapter", "control_file", "image_encoder", "caption_lora")


def apply(edits: tuple[Edit, ...], folder: Path) -> None:
    """Edit a folder. An edit of something that an earlier edit broke or removed does nothing."""
    for place, (name, *words) in enumerate(edits):
        if name in NEW_FILES or (folder / words[0]).is_file():
            with suppress(*[Exception] if place else []):
                EDITS[name](folder, *words)


def strange(folder: Path, file: str, how: str) -> None:
    """Replace a file with something strange."""
    path = folder / file
    content = path.read_bytes()
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "socket":
        with socket.socket(socket.AF_UNIX) as server, suppress(OSError):  # its path may be too long
            server.bind(str(path))
    elif how == "folder":
        path.mkdir()
    elif how == "endless":
        path.symlink_to("/dev/zero")
    elif how == "link to itself":
        path.symlink_to(path.name)
    elif how == "dangling link":
        path.symlink_to("nowhere")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "giant":
        path.write_bytes(content)
        os.truncate(path, MAX_BYTES + 2**20)  # a sparse file, which takes no space
    elif how == "no UTF-8":
        path.write_bytes(content + b"\xff\xfe")


STRANGE = ("gone", "pipe", "socket", "folder", "endless", "link to itself", "dangling link", "empty", "giant")
STRANGE += ("no UTF-8",)


def flip(folder: Path, file: str, place: str, bit: str) -> None:
    """Flip a bit at `place`, in 1/1000 of the file's length, so that it fits every file."""
    content = bytearray((folder / file).read_bytes())
    if content:
        content[int(place) * (len(content) - 1) // 1000] ^= 1 << int(bit)
    replace(folder / file, bytes(content))


def truncate(folder: Path, file: str, share: str) -> None:
    content = (folder / file).read_bytes()
    replace(folder / file, content[: int(share) * len(content) // 1000])


def append(folder: Path, file: str, count: str) -> None:
    replace(folder / file, (folder / file).read_bytes() + b"\x5a" * int(count))


def header(folder: Path, file: str, how: str) -> None:
    """Damage the header of a safetensors file: its length (8 bytes), or its JSON."""
    content = (folder / file).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    text, data = content[8 : 8 + length], content[8 + length :]
    if how in HEADER_LENGTHS:
        replace(folder / file, struct.pack("<Q", HEADER_LENGTHS[how] & (2**64 - 1)) + text + data)
        return
    entries = json.loads(text)
    key = next(key for key in entries if key != "__metadata__")
    changed = {"shape": "[-1]", "dtype": '"F7"', "data_offsets": "[0, 1]"} | {"metadata": JSON["5,000 digits"]}
    if how in entries[key]:
        entries[key][how] = "@value@"
    else:
        entries["__metadata__"] = "@value@"
    said = json.dumps(entries).replace('"@value@"', changed[how]).encode()
    replace(folder / file, struct.pack("<Q", len(said)) + said + data)


HEADER_LENGTHS = {"0": 0, "1": 1, "2^20": 2**20, "2^40": 2**40, "2^63": 2**63, "2^64 - 1": 2**64 - 1}
HEADERS = (*HEADER_LENGTHS, "shape", "dtype", "data_offsets", "metadata")


def tensor(folder: Path, file: str, how: str, place: str) -> None:
    """Change one tensor of a file, the one at `place` in 1/1000 of their number."""
    path = folder / file
    is_safe = path.suffix == ".safetensors"
    state = load_file(path) if is_safe else torch.load(path, weights_only=True)
    key = list(state)[int(place) * (len(state) - 1) // 1000]
    changed = TENSORS[how](state[key])
    del state[key]
    if changed is not None:
        state[f"{key}.more" if how == "renamed" else key] = changed
    if how == "extra":
        state["ema.extra"] = torch.zeros(2)
    buffer = io.BytesIO()
    if is_safe:
        path.unlink()
        save_file({name: each.contiguous() for name, each in state.items()}, path)
    else:
        torch.save(state, buffer)
        replace(path, buffer.getvalue())


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda value: None,
    "renamed": lambda value: value,
    "extra": lambda value: value,
    "misshapen": lambda value: torch.zeros(*value.shape, 2),
    "flat": lambda value: value.flatten() if value.ndim > 1 else value[None],
    "empty": lambda value: value[:0],
    "NaN": lambda value: torch.full_like(value, float("nan")),
    "infinity": lambda value: torch.full_like(value, -float("inf")),
    "large": lambda value: value * 1e30,
    "zero": torch.zeros_like,
    "double": lambda value: value.double(),
    "half": lambda value: value.bfloat16(),
    "float8": lambda value: value.to(torch.float8_e4m3fn),
    "float8 NaN": lambda value: torch.full_like(value, float("nan")).to(torch.float8_e4m3fn),
    "integers": lambda value: value.to(torch.int32),
    "bools": lambda value: value.bool(),
    "complex": lambda value: value.to(torch.complex64),
}


def pickled(folder: Path, file: str, how: str) -> None:
    """Pickle something else into a .bin."""
    path = folder / file
    replace(path, pickles.dump(how, torch.load(path, weights_only=True)))


def swapped(folder: Path, file: str, other: str) -> None:
    """Replace a file with another file of the folder, unless an earlier edit made that one a pipe."""
    if (folder / other).is_file():
        replace(folder / file, (folder / other).read_bytes())


def settings(folder: Path, key: str, value: str) -> None:
    """Write a PNG next to the model's files that records a setting with a value of JSON, or lacks it."""
    content = {"schema": png.SCHEMA, **PNG_RECORD, key: "@value@"}
    if value == GONE:
        del content[key]
    record = json.dumps(content).replace('"@value@"', JSON.get(value, ""))
    _write_png(folder, _chunk(b"iTXt", b"fastdiff\0\0\0\0\0" + record.encode(errors="surrogatepass")))


def chunk(folder: Path, how: str) -> None:
    """Write a PNG next to the model's files with damaged chunks."""
    record = json.dumps({"schema": png.SCHEMA, **PNG_RECORD}).encode()
    whole = _chunk(b"iTXt", b"fastdiff\0\0\0\0\0" + record)
    damaged = {
        "whole": whole,
        "checksum": whole[:-1] + bytes([whole[-1] ^ 1]),
        "length": b"\xff\xff\xff\xff" + whole[4:],
        "no settings": b"",
        "no text": _chunk(b"iTXt", b"fastdiff"),
        "no UTF-8": _chunk(b"iTXt", b"fastdiff\0\0\0\0\0\xff\xfe"),
        "twice": whole + _chunk(b"tEXt", b"fastdiff\0{}"),
        "bomb": _chunk(b"zTXt", b"fastdiff\0\0" + _bomb()),
        "damaged": _chunk(b"zTXt", b"fastdiff\0\0" + _bomb()[: len(_bomb()) // 2]),
        "long": _chunk(b"tEXt", b"fastdiff\0" + b" " * (png.MAX_TEXT + 1)),
        "parameters": _chunk(b"iTXt", b"parameters\0\0\0\0\0" + b"\x1b[31m\nSteps: 1, Sampler: \x00"),
    }
    _write_png(folder, damaged[how])


@cache
def _bomb() -> bytes:
    return zlib.compress(b"x" * 2**26, 9)


CHUNKS = ("whole", "checksum", "length", "no settings", "no text", "no UTF-8", "twice", "bomb", "damaged", "long")
CHUNKS += ("parameters",)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _write_png(folder: Path, between: bytes) -> None:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    pixels = _chunk(b"IDAT", zlib.compress(b"\0" * (8 * 25)))
    (folder / PNG_NAME).write_bytes(b"\x89PNG\r\n\x1a\n" + head + between + pixels + _chunk(b"IEND", b""))


def styles(folder: Path, content: str) -> None:
    """Write a file of styles next to the model's files."""
    (folder / STYLES_NAME).write_text(content, "utf-8", errors="surrogatepass", newline="")


_OF_TEXT = ("option", "no_option", "within", "whole", "shard", "encoded", "vocabulary", "merges")
_OF_FILES = (strange, swapped, flip, truncate, append, header, tensor, pickled)
_NEW = (settings, chunk, styles, write_dropped, single, embedding, lora, picture, controlnet, ip_adapter, control_file)
_NEW += (image_encoder, caption_lora)
EDITS: dict[str, Callable[..., None]] = {
    **{name: getattr(text_edits, name) for name in _OF_TEXT},
    **{each.__name__: each for each in (*_OF_FILES, *_NEW)},
}
OF_WEIGHTS = ("tensor", "swapped", "flip", "truncate", "append", "header", "pickled", "shard")


def must_be_refused(edit: Edit) -> bool:
    """Return whether drawing must fail after an edit of the weights."""
    name, *words = edit
    if name == "tensor":
        return words[1] in ("missing", "renamed", "extra", "misshapen", "empty", "NaN", "infinity", "float8 NaN")
    if name == "embedding":
        return embeddings.must_be_refused(*words)
    if name == "caption_lora":
        return words[1] == "NaN"
    if name == "lora":
        return loras.must_be_refused(*words)
    if name == "ip_adapter":
        return ip_adapters.must_be_refused(*words)
    if name == "image_encoder":
        return words[0] in ip_adapters.REFUSED_ENCODERS
    if name == "picture":
        return pictures.must_be_refused(*words)
    if name == "controlnet":
        return controls.must_be_refused(*words)
    if name == "control_file":
        return controls.file_must_be_refused(*words)
    if name == "single":
        return words[0] in hostile_files.REFUSED
    return (name == "pickled" and words[1] not in pickles.HARMLESS) or name == "shard"
