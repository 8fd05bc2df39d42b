"""The pictures that users start from: their uploads, and copies beside them of pictures that the page has drawn.

A path that a browser sends opens uploads alone. Its folder is a hash of the file's contents, which nobody else knows.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import processing_utils
from gradio_client.utils import strip_invalid_filename_characters  # type: ignore[import-untyped]

from fastdiff.arguments import shown
from fastdiff.checkpoints.single_files.listing import last_part
from fastdiff.errors import InputError
from fastdiff.pipelines.pil_images import as_rgb
from fastdiff.requests import png
from fastdiff.requests.input_picture import InputPicture
from fastdiff.runs import files
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.serving.security import size_of_uploads

# settings that are pictures: their names inside a PNG, their words, and the settings that need them
_INPUTS = {
    "init_image": ("init-image", "start picture", ("strength", "mask", "mask_blur")),
    "mask": ("mask", "mask", ("mask_blur",)),
}


def keep(data: bytes, name: str, limits: Limits) -> Path:
    """Write a picture beside the uploads and return its path. Raises InputError if the space for uploads is full."""
    folder = Path(gr.utils.get_upload_folder())
    path = folder / processing_utils.hash_bytes(data) / _file_name(name)
    if path.is_file():
        os.utime(path)  # Gradio deletes old files
        return path.resolve()
    if size_of_uploads(folder) + len(data) > limits.uploads:
        raise InputError("the server's space for uploads is full; try again later")
    files.write(path, data, overwrite=True)
    return path.resolve()


def _file_name(name: str) -> str:
    """Return a name of a user as Gradio names uploads."""
    return strip_invalid_filename_characters(name).strip(". ") or "picture"


def keep_drawn(path: Path, limits: Limits) -> Path:
    """Return a copy of a drawn picture. It lacks the pictures inside the PNG: else each start would hold all before it.

    Raises InputError, without the folder, if the picture is gone or damaged, and as `keep`.
    """
    with without_folder(path):
        return keep(png.without_inputs(path), path.name, limits)


def keep_inputs(path: Path, record: Mapping[str, Any], limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """Return copies of the pictures inside the PNG `path` that its `record` names, by setting, and lines about others.

    A setting is None if its picture is missing, and so are the settings that need it. Raises as `keep_drawn`.
    """
    kept: dict[str, Any] = {}
    lines = []
    for name, (setting, what, dependents) in _INPUTS.items():
        if record.get(name) is None or name in kept:
            continue
        with without_folder(path):
            data = png.read_input(path, setting)
        own = last_part(record[name])
        if data is not None and hashlib.sha256(data).hexdigest() == record.get(f"{name}_hash"):
            kept[name] = str(keep(data, own, limits))
        else:
            kept |= dict.fromkeys((name, *dependents))
            lines.append(f"not restored: the {what} {own}, which is not inside {path.name}")
    return kept, lines


def before_of(path: Path, record: Mapping[str, Any], limits: Limits) -> Path | None:
    """Return a copy of the picture that the PNG `path` starts from, as large as the PNG; None if it has none.

    Raises InputError as `keep_inputs`, and for data that is no picture.
    """
    name = keep_inputs(path, record, limits)[0].get("init_image")
    if name is None:
        return None
    start = Path(name)
    with without_folder(start):
        image = as_rgb(InputPicture.read(str(start)).open())
    with without_folder(path):
        height, width = InputPicture.read(str(path), pixels=False).size
    buffer = io.BytesIO()
    image.resize((width, height)).save(buffer, format="png", compress_level=1)
    return keep(buffer.getvalue(), "before.png", limits)


@contextlib.contextmanager
def without_folder(*paths: Path | None) -> Iterator[None]:
    """Let the block's InputErrors name files of the server without their folders."""
    try:
        yield
    except InputError as error:
        text = str(error)
        for path in filter(None, paths):
            text = text.replace(shown(str(path)), shown(path.name)).replace(str(path), path.name)
        raise InputError(text) from None
