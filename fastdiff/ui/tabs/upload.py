"""A PNG made by fastdiff, dropped onto the page, back into settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.request import Request
from fastdiff.ui.foreign import parse_parameters
from fastdiff.ui.limits import Limits

_HEADER = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"  # width and height follow


def build_upload() -> gr.File:
    return gr.File(
        label="Drop a PNG made here to restore its settings", file_types=[".png"], height=140, elem_id="upload"
    )


def uploaded_path(payload: Any) -> Path:
    """The uploaded file that the browser names. InputError for anything else: a link, another file of the server."""
    name = payload.get("path") if isinstance(payload, dict) else None
    if not isinstance(name, str) or "\0" in name:
        raise InputError("upload: drop a PNG file")
    folder, path = Path(gr.utils.get_upload_folder()).resolve(), Path(name)
    if path.resolve() != path or path.parent.parent != folder or not path.is_file():
        raise InputError("upload: that file was not uploaded, or is gone; drop it again")
    return path


def read_record(path: Path, limits: Limits) -> dict[str, Any]:
    """The settings in the PNG `path`, each of a valid kind. InputError, with the file's name, for any other file.

    Those of a grid are its first picture's, and `grid_of` is the number of its pictures.
    """
    try:
        _check_header(path, limits)
        record = png.read_settings(path)
        request = Request.from_flags({}, source=str(path))
    except InputError as error:
        raise InputError(str(error).replace(str(path), path.name)) from None
    return request.as_record() | _one_picture(request, record, path.name, limits)


def read_foreign(path: Path, limits: Limits) -> tuple[dict[str, Any], list[str]] | None:
    """The values that another tool wrote into the PNG `path`, and the names of settings that are none of ours.

    None for any other file. InputError as `read_record`.
    """
    try:
        _check_header(path, limits)
        text = png.read_text(path)
    except InputError as error:
        raise InputError(str(error).replace(str(path), path.name)) from None
    return None if "fastdiff" in text or "parameters" not in text else parse_parameters(text["parameters"])


def _check_header(path: Path, limits: Limits) -> None:
    with path.open("rb") as file:
        header = file.read(len(_HEADER) + 8)
    sides = header[len(_HEADER) :]
    if not header.startswith(_HEADER) or len(sides) < 8:
        raise InputError(f"{path.name} is not a PNG, whatever its name; drop a picture that was made here")
    width, height = (int.from_bytes(part, "big") for part in (sides[:4], sides[4:]))
    most = limits.pictures * limits.side**2
    if width * height > most:
        raise InputError(f"{path.name} has {width}x{height} pixels; drop a picture that was made here")


def _one_picture(request: Request, record: Mapping[str, Any], name: str, limits: Limits) -> dict[str, Any]:
    """Seed, label or prompt, and size of the picture; of the first one where the file is a grid."""
    is_grid = isinstance(record.get("seed"), list)
    sides = {"width": request.width, "height": request.height}
    size = {key: side for key, side in sides.items() if side is not None or not is_grid}  # old grids have no picture's
    if not all(side is not None and side <= limits.side for side in size.values()):
        raise InputError(f"{name} holds a size that cannot be used; its sides must be 1 to {limits.side}")
    seeds = request.seed if isinstance(request.seed, tuple) else (request.seed,)
    subject = {"label": request.label[0] if request.label else None}
    subject |= {"prompt": request.prompt[0]} if request.prompt else {}
    subject |= {"grid_of": len(seeds) * max(1, len(request.subjects))} if is_grid else {}
    return {"seed": seeds[0], **subject, **size}
