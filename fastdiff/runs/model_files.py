"""The single file that drew a PNG: at the recorded path, or in the user's models folder by its hash or its name.

The command may read whole files for their hashes. The page may not, and uses the hashes that are known.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdiff.checkpoints.model_hash import begin_known, file_hash, known_hash
from fastdiff.checkpoints.single_files.listing import VARIABLE, find_file, last_part, models_folder
from fastdiff.checkpoints.single_files.reading import has_model_suffix
from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.request import Request


def located(request: Request, source: str | None, models_dir: str | None) -> Request:
    """Return the request with the model of the PNG `source`, whose settings it has, where the single file is now.

    A request with another model stays as it is. Raises as `find_recorded`.
    """
    if source is None:
        return request
    record = png.read_settings(source)
    same = request.model == record.get("model")
    return replace(request, model=find_recorded(record, source, models_dir)) if same else request


def find_recorded(record: Mapping[str, Any], source: str, models_dir: str | None) -> str:
    """Return the model of the settings `record` of the PNG `source`. A single file is found where it is now.

    models_dir: the user's models folder. Default: FASTDIFF_MODELS.
    Raises InputError that names a file which is nowhere.
    """
    name = record["model"]
    if not has_model_suffix(name) or os.path.exists(name):
        return name
    digits, folder = _digits(record), models_folder(models_dir)
    found = None if folder is None else find_file(name, digits, folder)
    if found is not None:
        return str(found)
    places = f"{name}, and no models folder is given" if folder is None else f"{name}, nor in {folder} by hash or name"
    raise InputError(
        f"{source} was drawn with {_known_by(name, digits)}: it is not at {places}; give the file with --model, or "
        f"its folder with --models-dir or {VARIABLE}"
    )


def find_listed(record: Mapping[str, Any], source: str, files: Mapping[str, Path]) -> tuple[str, str | None]:
    """Return the name of the model of the settings `record` of the PNG `source`, and a line if its hash is another one.

    A single file is one of `files`, by their names: of the same name, else of the same hash, else with the same last
    part of the name. No large file is read, so only hashes that are known count. If that finds nothing, the other
    hashes are computed in a thread.
    Raises InputError that names a file which is not there.
    """
    name, digits = record["model"], _digits(record)
    if name not in files:
        if not has_model_suffix(name):
            return name, None
        hashes = {each: _known(path) for each, path in files.items()}
        same = [each for each, own in hashes.items() if own is not None and own == digits]
        named = [each for each in files if last_part(each) == last_part(name)]
        if not (same or named):
            unknown = [files[each] for each, own in hashes.items() if own is None] if digits else []
            begin_known(unknown)
            later = f"; fastdiff now computes {len(unknown)} hashes, so load the picture again later" if unknown else ""
            raise InputError(
                f"{source} was drawn with {_known_by(name, digits)}: no model here has this name or this hash{later}"
            )
        name = (same or named)[0]
    return name, _difference(name, _known(files[name]), digits, source)


def other_model_notice(record: Mapping[str, Any], source: str, model: str) -> str | None:
    """Return a line if `model` is a file that has the name of the model of `record`, and another hash."""
    digits, name = _digits(record), str(record.get("model"))
    if digits is None or model == name or last_part(model) != last_part(name) or not os.path.isfile(model):
        return None
    return _difference(model, file_hash(Path(model)), digits, source)


def _difference(model: str, own: str | None, digits: str | None, source: str) -> str | None:
    """Return a line if the hash of a file, `own`, is not the hash in the PNG `source`."""
    if own is None or digits is None or own == digits:
        return None
    return f"{model} has the model hash {own[:10]}, and {source} was drawn with {digits[:10]}; the picture will differ"


def _known(path: Path) -> str | None:
    try:
        return known_hash(path)
    except OSError:  # it is gone
        return None


def _known_by(name: str, digits: str | None) -> str:
    return f"{last_part(name)}, model hash {digits[:10] if digits else 'unknown'}"


def _digits(record: Mapping[str, Any]) -> str | None:
    """Return the SHA-256 in the settings, which come from outside. None if there is none."""
    digits = record.get("model_hash")
    return digits if isinstance(digits, str) and digits.isalnum() else None
