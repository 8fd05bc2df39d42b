"""The pictures of a run: of flags, or of a PNG whose settings it repeats. Imports no torch.

They are the picture that a run starts from, its mask, and the pictures for ControlNets and IP-Adapters.
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
from fastdiff.requests.input_picture import CONTROL, IMAGE_PROMPT, INIT_IMAGE, MASK, MAX_BYTES, stored_name
from fastdiff.requests.png import Recorded, read_input
from fastdiff.requests.request import Request

FLAGS = {"init_image": (INIT_IMAGE, "from the picture"), "mask": (MASK, "with the mask")}  # by field
_LISTS = {
    "control_image": (CONTROL, "with the control picture"),
    "ip_adapter_image": (IMAGE_PROMPT, "with the image prompt"),
}


def with_inputs_here(
    request: Request, source: Recorded | None, folder: str | None, given: Mapping[str, Any]
) -> Request:
    """Return the request with the places where its pictures are now.

    The pictures that the PNG `source` names are inside the PNG, or files.
    folder: where the files may be, by their hashes. They may also be in the current folder.
    given: the flags by field. The pictures of flags are not searched for.
    Raises InputError that names a picture which is nowhere.
    """
    if folder is not None and not os.path.isdir(folder):
        raise InputError(f"--input-dir: {folder} is not a folder; give the folder of your pictures")
    if source is None:
        return request
    found: dict[str, Any] = {}
    for field, (flag, what) in FLAGS.items():
        name, known = getattr(request, field), source.settings.get(f"{field}_hash")
        if given.get(field) is None and name is not None:
            found[field], found[f"{field}_inside"] = _here(flag, flag, what, name, known, source, folder)
    for field in _LISTS:
        if given.get(field) is None and getattr(request, field):
            found |= _listed_here(field, request, source, folder)
    return replace(request, **found)


def dropped_mask(source: Recorded, request: Request) -> Iterator[str]:
    """Yield a line if the request has another start picture than the PNG, and so not its mask."""
    mask = source.settings.get("mask")
    if mask is not None and request.mask is None and request.init_image is not None:
        name = shown(last_part(mask))
        yield f"{source.path} has the mask {name} for its own start picture; it is left out, unless --mask gives it"


def _listed_here(field: str, request: Request, source: Recorded, folder: str | None) -> dict[str, Any]:
    """Return the fields that say where the recorded pictures of a list are now."""
    (flag, what), digits = _LISTS[field], source.settings.get(f"{field}_hashes") or ()
    places = [
        _here(stored_name(flag, i), flag, what, name, digits[i : i + 1], source, folder)
        for i, name in enumerate(getattr(request, field))
    ]
    names, inside = zip(*places, strict=True)
    return {field: names, f"{field}_inside": inside}


def _here(
    stored: str, flag: str, what: str, name: str, known: Any, source: Recorded, folder: str | None
) -> tuple[str, str | None]:
    """Return the name of a recorded picture, and the PNG that holds it if one does, or else where the file is now.

    stored: its name inside the PNG.
    """
    known = "".join(known or ())
    digits = known if known.isalnum() else None
    embedded = read_input(source.path, stored)
    if embedded is not None and hashlib.sha256(embedded).hexdigest() == digits:
        return name, source.path
    drawn = f"{source.path} was drawn {what} {shown(last_part(name))}"
    return _find(name, digits, folder, drawn, flag), None


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
