"""Read settings from a picture that is dropped onto the page, made by fastdiff or by another tool."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr

from fastdiff.errors import InputError
from fastdiff.hosting.catalogue.controlnets import ControlNets
from fastdiff.hosting.catalogue.ip_adapters import IPAdapters
from fastdiff.requests import foreign, png
from fastdiff.requests.foreign import Foreign
from fastdiff.requests.request import AXES, Request
from fastdiff.ui.inputs.axes import Axes
from fastdiff.ui.parts.request import Limits

T = TypeVar("T")
_HEADER = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"  # width and height follow
_TYPES = (".png", ".jpg", ".jpeg", ".webp")
_REMEDY = "drop a PNG, JPEG or WebP picture that holds its settings"


def build_upload() -> gr.File:
    return gr.File(
        label="Drop a picture anywhere to load its settings", file_types=[*_TYPES], height=140, elem_id="upload"
    )


def read_record(path: Path, limits: Limits) -> dict[str, Any]:
    """Return the settings in the PNG `path`, checked and in the form that `form_settings` returns.

    Raises InputError, with the name of the file, for any other file.
    """

    def read(path: Path) -> dict[str, Any]:
        return form_settings(png.without_half_pairs(png.read_settings(path)), path.name, limits)

    return _read(path, limits, read)


def numerics_notice(path: Path) -> str | None:
    """Return a line if another numerics than this version's drew the PNG `path`.

    Raises InputError, with the name of the file, if it was deleted or damaged.
    """
    try:
        return png.numerics_notice(png.read_settings(path), path.name)
    except InputError as error:
        raise InputError(str(error).replace(str(path), path.name)) from None


def form_settings(record: Mapping[str, Any], name: str, limits: Limits) -> dict[str, Any]:
    """Return the settings of a picture as the form uses them.

    A grid has the settings of its first picture, and the number of its pictures: `num_images` if the form can draw them
    in one run, else `grid_of`. A sheet has `axes` (an Axes). A picture of a prompt has `model_hash`, and
    one with a start picture or a mask has their hashes and `mask`. Of several ControlNets or IP-Adapters, it has the
    first one, as `PictureReaders.first` returns it.
    Raises InputError for invalid values; `name` is the source of the record in the message.
    """
    request = Request.from_record(record, name)
    axes = {AXES: Axes.from_record(record[AXES], name)} if AXES in record else {}
    digits = {name: record[name] for name in ("model_hash", "init_image_hash", "mask_hash") if name in record}
    masks = {name: getattr(request, name) for name in ("mask", "mask_blur", "mask_crop")} if request.mask else {}
    one = masks | _one_picture(request, record, name, limits)
    one |= ControlNets.first(request, record) | IPAdapters.first(request, record)
    return request.as_record() | one | axes | digits


def read_foreign(path: Path, limits: Limits) -> Foreign | None:
    """Return the settings that another tool wrote into a picture; None for a PNG that fastdiff wrote.

    Raises InputError, with the name of the file, if it is no picture, or is damaged, or holds no settings.
    """
    return _read(path, limits, lambda path: _foreign(path, limits))


def _foreign(path: Path, limits: Limits) -> Foreign | None:
    with path.open("rb") as file:
        is_png = file.read(len(_HEADER)).startswith(_HEADER)
    if is_png and "fastdiff" in png.read_text(path):
        return None
    found = foreign.read(path, _most_pixels(limits))
    if found is None:
        raise InputError(
            f"{path.name} holds no settings that fastdiff knows; drop the file that the tool wrote, because editors "
            "and websites remove settings; to change the picture, drop it under Start picture"
        )
    return found


def _read(path: Path, limits: Limits, read: Callable[[Path], T]) -> T:
    """Call `read` on a picture that is not larger than the page's own. Its errors name the file without its folder."""
    try:
        _check_header(path, limits)
        return read(path)
    except InputError as error:
        raise InputError(str(error).replace(str(path), path.name)) from None


def _check_header(path: Path, limits: Limits) -> None:
    """Refuse what is no PNG, JPEG or WebP, and a PNG that is too large. `foreign.read` checks the others."""
    with path.open("rb") as file:
        header = file.read(len(_HEADER) + 8)
    if header.startswith(b"\xff\xd8\xff") or (header[:4], header[8:12]) == (b"RIFF", b"WEBP"):
        return
    sides = header[len(_HEADER) :]
    if not header.startswith(_HEADER) or len(sides) < 8:
        raise InputError(f"{path.name} is not a PNG, JPEG or WebP file; {_REMEDY}")
    width, height = (int.from_bytes(part, "big") for part in (sides[:4], sides[4:]))
    if width * height > _most_pixels(limits):
        raise InputError(f"{path.name} is too large ({width}x{height} pixels); drop a smaller picture")


def _most_pixels(limits: Limits) -> int:
    return 2 * limits.pictures * limits.side**2  # a sheet has room for captions


def _one_picture(request: Request, record: Mapping[str, Any], name: str, limits: Limits) -> dict[str, Any]:
    """Return seed, label or prompt, and size of the picture, or of the first picture of a grid."""
    is_grid = isinstance(record.get("seed"), list)
    sides = {"width": request.width, "height": request.height}
    size = {key: side for key, side in sides.items() if side is not None or not is_grid}  # old grids do not record it
    if not all(side is not None and side <= limits.side for side in size.values()):
        raise InputError(f"{name} has an invalid size; width and height must be 1 to {limits.side}")
    seeds = request.seed if isinstance(request.seed, tuple) else (request.seed,)
    subject = {"label": request.label[0] if request.label else None}
    subject |= {"prompt": request.prompt[0]} if request.prompt else {}
    if is_grid:
        count = len(seeds) * max(1, len(request.subjects))
        is_run = count <= limits.pictures and list(seeds) == [int(seeds[0]) + i for i in range(count)]
        subject |= {"num_images" if is_run else "grid_of": count}
    return {"seed": seeds[0], **subject, **size}
