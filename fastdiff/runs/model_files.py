"""The single files that drew a PNG: at the recorded paths, or in the user's models folder by their hashes or names.

The command may read whole files for their hashes. The page may not, and uses the hashes that are known.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdiff.checkpoints.model_hash import begin_known, file_hash, known_hash
from fastdiff.checkpoints.single_files.listing import VARIABLE, find_file, last_part, models_folder
from fastdiff.checkpoints.single_files.reading import has_model_suffix
from fastdiff.errors import InputError
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request

_WORDS = {"model": "model", "vae": "VAE"}  # by settings that name a file; "model_hash" is the hash of "model"
LEAST_DIGITS = 8  # of a hash that other tools write


def located(request: Request, source: Recorded | None, models_dir: str | None) -> Request:
    """Return the request with the model and the VAE of the PNG whose settings it has, where the files are now.

    A request with another model or VAE keeps it. Raises as `find_recorded`.
    """
    if source is None:
        return request
    same = [name for name in _WORDS if getattr(request, name) == source.settings.get(name) is not None]
    found: dict[str, Any] = {name: find_recorded(source, name, models_dir) for name in same}
    return replace(request, **found)


def find_recorded(source: Recorded, setting: str, models_dir: str | None) -> str:
    """Return the model or the VAE of a PNG. A single file is found where it is now.

    setting: "model" or "vae". models_dir: the user's models folder. Default: FASTDIFF_MODELS.
    Raises InputError that names a file which is nowhere.
    """
    name = source.settings[setting]
    if not has_model_suffix(name) or os.path.exists(name):
        return name
    digits, folder = _digits(source.settings, setting), models_folder(models_dir)
    found = None if folder is None else find_file(name, digits, folder)
    if found is not None:
        return str(found)
    places = f"{name}, and no models folder is given" if folder is None else f"{name}, nor in {folder} by hash or name"
    raise InputError(
        f"{source.path} was drawn with {_known_by(name, digits, setting)}: it is not at {places}; give the file with "
        f"--{setting}, or its folder with --models-dir or {VARIABLE}"
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


def find_of_tool(name: str, digits: str, files: Mapping[str, Path]) -> str | None:
    """Return the name of the file that another tool names, which often leaves out the folder and the suffix, or None.

    digits: the first ones of the file's hash, or "". As in `find_listed`, only hashes that are known count.
    """
    same = [each for each, path in files.items() if len(digits) >= LEAST_DIGITS and _begins(_known(path), digits)]
    named = [each for each in files if name and _stem(each) == _stem(name)]
    return next(iter(same + named), None)


def _begins(own: str | None, digits: str) -> bool:
    return own is not None and own.startswith(digits.lower())


def _stem(name: str) -> str:
    last = last_part(name)
    return os.path.splitext(last)[0] if has_model_suffix(last) else last


def other_file_notices(source: Recorded, request: Request) -> Iterator[str]:
    """Yield a line for each file of `request` that has the name of a file of the PNG, and another hash."""
    for setting in _WORDS:
        name, now = source.settings.get(setting), getattr(request, setting)
        if name and now and now != name and last_part(now) == last_part(name) and os.path.isfile(now):
            digits = _digits(source.settings, setting)
            line = digits and _difference(now, file_hash(Path(now)), digits, source.path, setting)
            yield from [line] if line else []


def _difference(file: str, own: str | None, digits: str | None, source: str, setting: str = "model") -> str | None:
    """Return a line if the hash of a file, `own`, is not the hash in the PNG `source`."""
    if own is None or digits is None or own == digits:
        return None
    drawn = f"{source} was drawn with {digits[:10]}; the picture will differ"
    return f"{file} has the {_WORDS[setting]} hash {own[:10]}, and {drawn}"


def _known(path: Path) -> str | None:
    try:
        return known_hash(path)
    except OSError:  # it is gone
        return None


def _known_by(name: str, digits: str | None, setting: str = "model") -> str:
    return f"{last_part(name)}, {_WORDS[setting]} hash {digits[:10] if digits else 'unknown'}"


def _digits(settings: Mapping[str, Any], setting: str = "model") -> str | None:
    """Return the recorded SHA-256 of a file. None if there is none."""
    digits = settings.get(f"{setting}_hash")
    return digits if digits and digits.isalnum() else None
