"""Find the models below a folder of the user: model folders in diffusers' layout, and single files."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.checkpoints.single_files.reading import SUFFIXES
from fastdiff.errors import InputError

VARIABLE = "FASTDIFF_MODELS"  # the environment variable with the folder
MAX_DEPTH = 3  # folders below the models folder


def models_folder(given: str | Path | None) -> Path | None:
    """Return the folder of the user's models: the given one or FASTDIFF_MODELS. InputError if it does not exist."""
    name = given or os.environ.get(VARIABLE)
    if not name:
        return None
    if not os.path.isdir(name):
        source = "--models-dir" if given else VARIABLE
        raise InputError(f"{source}: {name} is not a folder; give the folder that contains your models")
    return Path(name)


def find_models(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield what looks like a model at most `depth` levels below `folder`, sorted: model folders and files of weights.

    Model folders are not searched. Links are followed, except to a folder that holds them. Folders and links that
    cannot be followed are included, so that a list can say what is wrong with them.
    """
    try:
        children = sorted(folder.iterdir())
        os.stat(os.path.join(folder, "."))  # it may be readable but not searchable
    except OSError:
        yield folder
        return
    for child in children:
        is_dangling = os.path.islink(child) and not os.path.exists(child)
        if is_dangling or os.path.lexists(child / "model_index.json"):
            yield child
        elif os.path.isdir(child):
            if depth > 1 and not (os.path.islink(child) and folder.resolve().is_relative_to(child.resolve())):
                yield from find_models(child, depth - 1)
        elif child.suffix.lower() in SUFFIXES:
            yield child


def find_file(name: str, digits: str | None, folder: Path) -> Path | None:
    """Return the file below `folder` whose SHA-256 is `digits`, or else the first one with the last part of `name`.

    Files of this name are read first. None if there is no such file.
    """
    last = last_part(name)
    files = sorted(filter(os.path.isfile, find_models(folder)), key=lambda path: path.name != last)
    for path in files if digits else ():
        with contextlib.suppress(OSError):
            if file_hash(path) == digits:
                return path
    return next((path for path in files if path.name == last), None)


def last_part(name: str) -> str:
    """Return the last part of a path, of this system or another one."""
    return re.split(r"[\\/]", name)[-1]
