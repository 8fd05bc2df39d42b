"""The pictures that users start from: their uploads, and copies beside them of pictures that the page has drawn.

A path that a browser sends opens uploads alone. Its folder is a hash of the file's contents, which nobody else knows.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import processing_utils
from gradio_client.utils import strip_invalid_filename_characters  # type: ignore[import-untyped]

from fastdiff.arguments import shown
from fastdiff.checkpoints.single_files.listing import last_part
from fastdiff.errors import InputError
from fastdiff.execution import temporaries
from fastdiff.requests import png
from fastdiff.requests.input_picture import CONTROL, IMAGE_PROMPT, INIT_IMAGE, MASK

PICTURES = "pictures"  # folder beside the uploads, for API clients without a login
# settings that are pictures: their names inside a PNG, their words, and the settings that need them
_INPUTS = {
    "init_image": (INIT_IMAGE, "start picture", ("strength", "mask", "mask_blur")),
    "mask": (MASK, "mask", ("mask_blur",)),
    "control_image": (
        CONTROL,
        "control picture",
        ("control", "control_scale", "control_start", "control_end", "guess_mode"),
    ),
    "ip_adapter_image": (IMAGE_PROMPT, "image prompt", ("ip_adapter", "ip_adapter_scale")),
}


def uploaded_path(payload: Any, field: str = "upload") -> Path:
    """Return an uploaded file, given as Gradio's FileData or as its path.

    field: begins the message. Raises InputError for anything else, such as a link or another file of the server.
    """
    name = payload.get("path") if isinstance(payload, dict) else payload
    if not isinstance(name, str) or "\0" in name:
        raise InputError(f"{field}: drop a PNG, JPEG or WebP file")
    folder, path = Path(gr.utils.get_upload_folder()).resolve(), Path(name)
    try:
        is_upload = path.resolve() == path and path.parent.parent == folder and path.is_file()
    except (OSError, ValueError):  # the name is too long
        is_upload = False
    if not is_upload:
        raise InputError(f"{field}: this file was not uploaded, or was deleted; drop it again")
    return path


def keep(data: bytes, name: str, most: int) -> Path:
    """Write a picture beside the uploads and return its path.

    most: the bytes of all uploads. Raises InputError if they are reached, OSError if the disk cannot be written.
    """
    folder = Path(gr.utils.get_upload_folder())
    path = folder / processing_utils.hash_bytes(data) / _file_name(name)
    if path.is_file():
        os.utime(path)  # Gradio deletes old files
        return path.resolve()
    if size_of_uploads(folder) + len(data) > most:
        raise InputError("the server's space for uploads is full; try again later")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporaries.holding(path.parent, data) as temporary:
        os.replace(temporary, path)
    return path.resolve()


def _file_name(name: str) -> str:
    """Return a name of a user as Gradio names uploads."""
    return strip_invalid_filename_characters(name).strip(". ") or "picture"


def keep_drawn(path: Path, most: int) -> Path:
    """Return a copy of a drawn picture. It lacks the pictures inside the PNG: else each start would hold all before it.

    Raises InputError, without the folder, if the picture is gone or damaged, and as `keep`.
    """
    with without_folder(path):
        return keep(png.without_inputs(path), path.name, most)


def keep_inputs(
    path: Path, record: Mapping[str, Any], most: int, names: Sequence[str] = tuple(_INPUTS)
) -> tuple[dict[str, Any], list[str]]:
    """Return copies of the pictures inside the PNG `path` that its `record` names, by setting, and lines about others.

    A setting is None if its picture is missing, and so are the settings that need it. Raises as `keep_drawn`.

    names: the settings; by default, all that are pictures.
    """
    kept: dict[str, Any] = {}
    lines = []
    for name in names:
        setting, what, dependents = _INPUTS[name]
        if record.get(name) is None or name in kept:
            continue
        with without_folder(path):
            data = png.read_input(path, setting)
        own = last_part(record[name])
        if data is not None and hashlib.sha256(data).hexdigest() == record.get(f"{name}_hash"):
            kept[name] = str(keep(data, own, most))
        else:
            kept |= dict.fromkeys((name, *dependents))
            lines.append(f"not restored: the {what} {own}, which is not inside {path.name}")
    return kept, lines


@contextlib.contextmanager
def without_folder(*paths: Path | None) -> Iterator[None]:
    """Let the block's InputErrors name files of the server without their folders."""
    try:
        yield
    except InputError as error:
        text = str(error)
        for path in filter(None, paths):
            text = text.replace(shown(str(path)), shown(path.name)).replace(str(path), path.name)
        raise type(error)(text) from None


def size_of_uploads(folder: Path) -> int:
    """Return the bytes of all uploads below `folder`. Pictures of API clients in it have their own quota."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another request may delete it
            total += 0 if path.is_relative_to(folder / PICTURES) else path.lstat().st_size
    return total
