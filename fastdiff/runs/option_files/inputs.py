"""The picture that a run starts from, and its mask: of a flag, or of a PNG whose settings it repeats.

Imports no torch.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdiff.arguments import shown
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.checkpoints.single_files.listing import last_part
from fastdiff.errors import InputError
from fastdiff.requests.input_picture import INIT_IMAGE, MASK, MAX_BYTES
from fastdiff.requests.png import Recorded, read_input
from fastdiff.requests.request import Request

FLAGS = {"init_image": (INIT_IMAGE, "from the picture"), "mask": (MASK, "with the mask")}  # by field


def with_inputs_here(
    request: Request, source: Recorded | None, folder: str | None, given: Mapping[str, Any]
) -> Request:
    """Return the request with its picture and mask where they are now. Those of the PNG `source` are in it, or files.

    folder: where the files may be, by their hashes. They may also be in the current folder.
    given: the flags by field. The pictures of flags are not searched for.
    Raises InputError that names a picture which is nowhere.
    """
    if folder is not None and not os.path.isdir(folder):
        raise InputError(f"--input-dir: {folder} is not a folder; give the folder of your pictures")
    if source is None:
        return request
    found: dict[str, Any] = {}
    for field in FLAGS:
        if given.get(field) is None and getattr(request, field) is not None:
            found |= _here(field, getattr(request, field), source, folder)
    return replace(request, **found)


def _here(field: str, name: str, source: Recorded, folder: str | None) -> dict[str, str]:
    """Return the fields that say where a recorded picture is now."""
    flag, what = FLAGS[field]
    known = source.settings.get(f"{field}_hash")
    digits = known if known and known.isalnum() else None
    embedded = read_input(source.path, flag)
    if embedded is not None and hashlib.sha256(embedded).hexdigest() == digits:
        return {f"{field}_inside": source.path}
    drawn = f"{source.path} was drawn {what} {shown(last_part(name))}"
    return {field: _find(name, digits, folder, drawn, flag)}


def _find(name: str, digits: str | None, folder: str | None, drawn: str, flag: str) -> str:
    folders = [*([] if folder is None else [folder]), "."]
    for path in _candidates(name, folders):
        with contextlib.suppress(OSError):
            if digits is None or file_hash(path) == digits:
                return str(path)
    where = name if os.path.dirname(name) else f"{name} in its folder"
    also = "" if folder is None else f", in {folder}"
    raise InputError(
        f"{drawn}, hash {digits[:10] if digits else 'unknown'}: it is not at {where}{also} or here; give the file with "
        f"--{flag}, or its folder with --input-dir"
    )


def _candidates(name: str, folders: list[str]) -> Iterator[Path]:
    """Yield the files that may hold the picture: the one of this name, then those in the folders, that name first."""
    last = last_part(name)
    yield from filter(_is_small_file, [Path(name)])
    for folder in folders:
        with contextlib.suppress(OSError):
            yield from filter(
                _is_small_file, sorted(Path(folder).iterdir(), key=lambda path: (path.name != last, path))
            )


def _is_small_file(path: Path) -> bool:
    """Return whether a path is a file that a picture may be."""
    try:
        return path.is_file() and path.stat().st_size <= MAX_BYTES
    except (OSError, ValueError):
        return False
