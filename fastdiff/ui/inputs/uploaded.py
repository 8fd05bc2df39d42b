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

START = "init-image"  # the name of the start picture inside a PNG


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


def keep_start(path: Path, record: Mapping[str, Any], limits: Limits) -> tuple[Path | None, str | None]:
    """Return a copy of the picture inside the PNG `path` that its `record` starts from, or a line that it is missing.

    Both are None for a record without a start picture. Raises InputError as `keep_drawn`.
    """
    name = record.get("init_image")
    if name is None:
        return None, None
    with without_folder(path):
        data = png.read_input(path, START)
    if data is None or hashlib.sha256(data).hexdigest() != record.get("init_image_hash"):
        return None, f"not restored: the start picture {last_part(name)}, which is not inside {path.name}"
    return keep(data, last_part(name), limits), None


def before_of(path: Path, record: Mapping[str, Any], limits: Limits) -> Path | None:
    """Return a copy of the picture that the PNG `path` starts from, as large as the PNG; None if it has none.

    Raises InputError as `keep_start`, and for data that is no picture.
    """
    start, _ = keep_start(path, record, limits)
    if start is None:
        return None
    with without_folder(start):
        image = as_rgb(InputPicture.read(str(start)).open())
    with without_folder(path):
        height, width = InputPicture.read(str(path), pixels=False).size
    buffer = io.BytesIO()
    image.resize((width, height)).save(buffer, format="png", compress_level=1)
    return keep(buffer.getvalue(), "before.png", limits)


@contextlib.contextmanager
def without_folder(path: Path | None) -> Iterator[None]:
    """Let the block's InputErrors name a file of the server without its folder."""
    try:
        yield
    except InputError as error:
        if path is None:
            raise
        text = str(error).replace(shown(str(path)), shown(path.name)).replace(str(path), path.name)
        raise InputError(text) from None
