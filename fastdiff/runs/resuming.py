"""The files that a run keeps: those whose settings are the ones that the run would write itself.

Neither the device nor the versions are compared: a run may continue on another machine or after an update, where the
last bits may differ, and each PNG records what drew it. The dtype is compared.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.checkpoints.model_hash import find_files
from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.completion import Cell
from fastdiff.requests.defaults import PRECISION
from fastdiff.requests.request import UPSCALE_SETTINGS
from fastdiff.runs.drawing import Run
from fastdiff.runs.option_files.kinds import files_of
from fastdiff.runs.sheet import sheet_size

if TYPE_CHECKING:
    from PIL.Image import Image

_SHOWN = 3  # different settings in a message
# Settings that a PNG leaves out if they have these values
_UNSAID: dict[str, Any] = {"precision": PRECISION, "embedding": [], "lora": []}
_UNSAID |= {"init_image_hash": None, "strength": None}
_UNSAID |= dict.fromkeys(("mask_hash", "mask_blur", "mask_crop", *UPSCALE_SETTINGS))
_UNSAID |= dict.fromkeys(("control", "control_image_hashes", "control_scale", "control_start", "control_end"))
_UNSAID |= dict.fromkeys(("guess_mode", "ip_adapter", "ip_adapter_image_hashes", "ip_adapter_scale", "image_encoder"))
_OF_MACHINES = ("device", "versions")  # settings that are not compared


def with_number_format(run: Run, device: str) -> Run:
    """Return `run` with its dtype chosen for `device`, for comparison. InputError if there is no such device.

    Imports torch if the dtype is auto.
    """
    if run.request.dtype != "auto":
        return run
    from fastdiff.execution.devices import dtype_name, resolve_device, resolve_dtype

    dtype = dtype_name(resolve_dtype("auto", resolve_device(device)))
    return replace(run, request=replace(run.request, dtype=dtype))  # type: ignore[arg-type]  # one of them


def find_pictures(run: Run, paths: Sequence[Path]) -> dict[int, dict[str, Any]]:
    """Return the settings of the run's pictures that already exist at their `paths`, by place.

    InputError for a file that is not the picture of its cell.
    """
    found = {}
    for place, (path, cell) in enumerate(zip(paths, run.cells, strict=True)):
        if os.path.lexists(path):
            found[place] = _read(path, _cell_settings(run, cell))
    return found


def has_grid(run: Run, path: Path, columns: int) -> bool:
    """Return whether the grid of `run` exists. InputError for another file in its place."""
    if not os.path.lexists(path):
        return False
    _read(path, _grid_settings(run, columns))
    return True


def find_same(run: Run, path: Path, cell: Cell, since: int) -> dict[str, Any] | None:
    """Return the settings of the picture at `path` if it is the picture of `cell`, written after `since`, else None."""
    return _same(path, _cell_settings(run, cell), since)


def is_same_grid(run: Run, path: Path, columns: int, since: int) -> bool:
    """Return whether the file at `path` is the grid of `run`, written after `since`."""
    return _same(path, _grid_settings(run, columns), since) is not None


def last_change(run: Run) -> int:
    """Return when a file of a local model, an embedding or a LoRA was last changed, in nanoseconds, and 0 without any.

    The name of a hub model comes with its revision, so its settings say which weights drew a picture.
    """
    files = {*files_of(run.request)}
    if os.path.isdir(run.request.model):
        files |= find_files(run.card, run.request.variant)
    return max((os.stat(file).st_mtime_ns for file in files), default=0)


def holds(path: Path, record: Mapping[str, Any]) -> bool:
    """Return whether the PNG `path` has the settings `record`, whatever device and versions drew it."""
    try:
        return not _differing(png.read_settings(path), {k: v for k, v in record.items() if k not in _OF_MACHINES})
    except InputError:
        return False


def _same(path: Path, expected: Mapping[str, Any], since: int) -> dict[str, Any] | None:
    """Return the settings in the PNG `path`, or None if they differ or it is older than `since`."""
    try:
        record = png.read_settings(path)
    except InputError:
        return None
    is_current = not _differing(record, expected) and os.stat(path).st_mtime_ns > since
    return _without_schema(record) if is_current else None


def grid_settings(run: Run) -> dict[str, Any]:
    """Return the settings of a grid that differ from its pictures', except the size."""
    own = {"seed": list(dict.fromkeys(cell.seed for cell in run.cells)), "label": list(run.request.label) or None}
    return own | ({"prompt": list(run.request.prompt)} if run.request.prompt else {})


def load_picture(path: Path, record: Mapping[str, Any]) -> "Image":
    """Return the pixels of a picture with the settings `record`. InputError if they are damaged."""
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.size != (record["width"], record["height"]):
                raise ValueError("its size differs from its settings")
            image.load()
            return image
    except (OSError, SyntaxError, ValueError, KeyError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is damaged ({error}); remove it, or draw it again with --overwrite") from None


def _grid_settings(run: Run, columns: int) -> dict[str, Any]:
    size = _size(run.size and sheet_size(len(run.cells), columns, run.size))
    return _shared_settings(run, run.cells[0]) | grid_settings(run) | size


def _cell_settings(run: Run, cell: Cell) -> dict[str, Any]:
    own = {"seed": cell.seed, "label": cell.label_name} | ({"prompt": cell.prompt} if run.request.prompt else {})
    return _shared_settings(run, cell) | _size(run.size) | own


def _shared_settings(run: Run, cell: Cell) -> dict[str, Any]:
    """Return the settings that do not say which picture of a run it is. The hash of a picture counts, not its name."""
    shared = {name: value for name, value in run.request.as_record().items() if name != "init_image"}
    return shared | cell.as_identity()


def _size(size: tuple[int, int] | None) -> dict[str, int]:
    """Return the settings of a picture's `size`, (width, height)."""
    return dict(zip(("width", "height"), size or (), strict=False))


def _read(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the PNG `path`. InputError if one of the `expected` settings differs."""
    remedy = "choose another place with -o, or give --overwrite instead of --resume"
    try:
        record = png.read_settings(path)
    except InputError as error:
        raise InputError(f"--resume: {error}; {remedy}") from None
    wrong = _differing(record, expected)
    if wrong:
        found, expected = _UNSAID | record, _UNSAID | dict(expected)
        differences = [f"{name} {_shown(found.get(name))}, not {_shown(expected[name])}" for name in wrong[:_SHOWN]]
        raise InputError(f"{path} was drawn with {', '.join(differences)}; {remedy}")
    return _without_schema(record)


def _differing(record: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the names of the `expected` settings that a picture's `record` lacks, or has with other values."""
    expected, found = _UNSAID | dict(expected), _UNSAID | dict(record)
    return [name for name, value in expected.items() if name not in found or found[name] != value]


def _without_schema(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("schema", "numerics")}


def _shown(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.80}"
