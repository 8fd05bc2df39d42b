"""The picture that a run starts from: of a flag, or of a PNG whose settings it repeats. Imports no torch."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fastdiff.arguments import shown
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.checkpoints.single_files.listing import last_part
from fastdiff.errors import InputError
from fastdiff.requests.input_picture import MAX_BYTES
from fastdiff.requests.png import Recorded, read_input
from fastdiff.requests.request import Request

SETTING = "init-image"


def with_input_here(request: Request, source: Recorded | None, folder: str | None, given: str | None) -> Request:
    """Return the request with its picture where it is now. A picture of the PNG `source` is in the PNG, or in a file.

    folder: where the file may be, by its hash. It may also be in the current folder.
    given: the picture of a flag, which is not searched for.
    Raises InputError that names a picture which is nowhere.
    """
    if folder is not None and not os.path.isdir(folder):
        raise InputError(f"--input-dir: {folder} is not a folder; give the folder of your pictures")
    if source is None or given is not None or request.init_image is None:
        return request
    name, known = request.init_image, source.settings.get("init_image_hash")
    digits = known if known and known.isalnum() else None
    embedded = read_input(source.path, SETTING)
    if embedded is not None and hashlib.sha256(embedded).hexdigest() == digits:
        return replace(request, init_image_inside=source.path)
    return replace(request, init_image=_find(name, digits, source.path, folder))


def _find(name: str, digits: str | None, source: str, folder: str | None) -> str:
    folders = [*([] if folder is None else [folder]), "."]
    for path in _candidates(name, folders):
        with contextlib.suppress(OSError):
            if digits is None or file_hash(path) == digits:
                return str(path)
    where = name if os.path.dirname(name) else f"{name} in its folder"
    also = "" if folder is None else f", in {folder}"
    raise InputError(
        f"{source} was drawn from the picture {shown(last_part(name))}, hash {digits[:10] if digits else 'unknown'}: "
        f"it is not at {where}{also} or here; give the file with --{SETTING}, or its folder with --input-dir"
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
