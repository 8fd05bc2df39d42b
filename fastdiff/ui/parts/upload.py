"""Read settings from a PNG that is dropped onto the page, made by fastdiff or by another tool."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.request import AXES, Request
from fastdiff.sampler_names import SCHEDULERS
from fastdiff.ui.parts.axes import Axes
from fastdiff.ui.parts.request import Limits

T = TypeVar("T")
_HEADER = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"  # width and height follow
_SETTING = re.compile(r'\s*([^:,]+):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)')
_SCHEDULERS = {png.sampler_name(name): name for name in SCHEDULERS}
_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {  # settings of other tools, with our names and converters
    "Steps": ("steps", int),
    "CFG scale": ("guidance_scale", float),
    "Seed": ("seed", int),
    "Clip skip": ("clip_skip", lambda text: int(text) - 1),  # other tools count from 1, which uses all layers
}
_PLAIN = ("", "automatic", "normal")  # schedule types that mean the default
_SAID = ("Size", "Schedule type")  # read as width and height, and with the sampler


def build_upload() -> gr.File:
    return gr.File(label="Drop a PNG anywhere to load its settings", file_types=[".png"], height=140, elem_id="upload")


def uploaded_path(payload: Any) -> Path:
    """Return the uploaded file. Raises InputError for anything else, such as a link or another file of the server."""
    name = payload.get("path") if isinstance(payload, dict) else None
    if not isinstance(name, str) or "\0" in name:
        raise InputError("upload: drop a PNG file")
    folder, path = Path(gr.utils.get_upload_folder()).resolve(), Path(name)
    if path.resolve() != path or path.parent.parent != folder or not path.is_file():
        raise InputError("upload: this file was not uploaded, or was deleted; drop it again")
    return path


def read_record(path: Path, limits: Limits) -> dict[str, Any]:
    """Return the settings in the PNG `path`, checked and in the form that `form_settings` returns.

    Raises InputError, with the name of the file, for any other file.
    """
    return _read(path, limits, lambda path: form_settings(png.read_settings(path), path.name, limits))


def form_settings(record: Mapping[str, Any], name: str, limits: Limits) -> dict[str, Any]:
    """Return the settings of a picture as the form uses them.

    A grid has the settings of its first picture, and the number of its pictures: `num_images` if the form can draw them
    in one run, else `grid_of`. A sheet has `axes` (an Axes). Raises InputError for invalid values; `name` is the source
    of the record in the message.
    """
    request = Request.from_record(record, name)
    axes = {AXES: Axes.from_record(record[AXES], name)} if AXES in record else {}
    return request.as_record() | _one_picture(request, record, name, limits) | axes


def read_foreign(path: Path, limits: Limits) -> tuple[dict[str, Any], list[str]] | None:
    """Return the values that another tool wrote into the PNG `path`, and the names of settings that fastdiff lacks.

    Returns None for any other file. Raises InputError like `read_record`.
    """
    text = _read(path, limits, png.read_text)
    return None if "fastdiff" in text or "parameters" not in text else parse_parameters(text["parameters"])


def _read(path: Path, limits: Limits, read: Callable[[Path], T]) -> T:
    """Call `read` on a PNG that is not larger than the page's own. Its errors name the file without its folder."""
    try:
        _check_header(path, limits)
        return read(path)
    except InputError as error:
        raise InputError(str(error).replace(str(path), path.name)) from None


def _check_header(path: Path, limits: Limits) -> None:
    with path.open("rb") as file:
        header = file.read(len(_HEADER) + 8)
    sides = header[len(_HEADER) :]
    if not header.startswith(_HEADER) or len(sides) < 8:
        raise InputError(f"{path.name} is not a PNG file; drop a picture that was made here")
    width, height = (int.from_bytes(part, "big") for part in (sides[:4], sides[4:]))
    most = 2 * limits.pictures * limits.side**2  # a sheet has room for captions
    if width * height > most:
        raise InputError(f"{path.name} is too large ({width}x{height} pixels); drop a picture that was made here")


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


def parse_parameters(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values in the text that AUTOMATIC1111 and similar tools write into a PNG, and unknown settings' names.

    The values are named as in UncheckedRequest. The text is the prompt, the negative prompt, and a line of settings
    that begins with Steps.
    """
    before, steps, line = text.rpartition("Steps: ")
    if not steps:
        before, line = text, ""
    prompt, _, negative = before.partition("Negative prompt:")
    settings = {name.strip(): value.strip().strip('"') for name, value in _SETTING.findall(steps + line)}
    values: dict[str, Any] = {"prompt": prompt.strip()}
    values |= {"negative_prompt": negative.strip()} if negative.strip() else {}
    rest = [name for name in settings if name not in (*_VALUES, *_SAID, "Sampler")]
    for name, (key, kind) in _VALUES.items():
        if name in settings:
            try:
                values[key] = kind(settings[name])
            except ValueError:
                rest.append(name)
    if "Sampler" in settings:
        values["scheduler"] = _scheduler(settings["Sampler"], settings.get("Schedule type", ""))
    if size := re.fullmatch(r"(\d{1,5})x(\d{1,5})", settings.get("Size", "")):
        values |= {"width": int(size[1]), "height": int(size[2])}
    return values, rest


def _scheduler(sampler: str, schedule_type: str) -> str:
    """Return our name of the scheduler, or the other tool's name if there is none."""
    if sampler.endswith(" Karras"):  # older versions append the schedule type to the sampler
        sampler, schedule_type = sampler.removesuffix(" Karras"), "Karras"
    kind = None if schedule_type.lower() in _PLAIN else schedule_type
    return _SCHEDULERS.get((sampler, kind), " ".join(filter(None, [sampler, kind])))
