"""Find the models that are here: in the hub's cache, and folders and single files below a folder of the user."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.checkpoints.registry import controlnet_class, controlnets_below
from fastdiff.checkpoints.single_files.reading import SUFFIXES
from fastdiff.errors import InputError

VARIABLE = "FASTDIFF_MODELS"  # the environment variable with the folder
MAX_DEPTH = 3  # folders below the models folder


def cached_models() -> dict[str, Path]:
    """Return the models in huggingface_hub's cache that fastdiff can draw with: hub id to folder.

    The folder holds the main revision, or else the last download. Models whose files cannot be read are
    included, so that a list can say what is wrong with them. The result is empty without a cache.
    """
    return _cached(lambda folder: _is_supported(folder) or _is_broken(folder), unreadable=True)


def cached_controlnets() -> dict[str, Path]:
    """Return the folders with ControlNets in huggingface_hub's cache: hub id to folder. A folder may hold several.

    ControlNets of pipelines are left out. `cached_models` describes the folder.
    """
    return _cached(_holds_controlnets, unreadable=False)


def _holds_controlnets(folder: Path) -> bool:
    is_pipeline = (folder / "model_index.json").is_file()
    return not is_pipeline and bool(controlnet_class(folder) or controlnets_below(folder))


def _cached(is_listed: Callable[[Path], bool], *, unreadable: bool) -> dict[str, Path]:
    """Return the folders of cached repositories that are to be listed: hub id to folder.

    unreadable: whether to list repositories that cannot be read.
    """
    from huggingface_hub import constants

    found = {}
    for repo in sorted(
        Path(constants.HF_HUB_CACHE).glob(f"{hub.CACHED}*")
    ):  # scan_cache_dir stops at unreadable folders
        try:
            folder = _newest_snapshot(repo)
            is_wanted = folder is not None and is_listed(folder)
        except OSError:
            folder, is_wanted = repo, unreadable
        if folder is not None and is_wanted:
            found[repo.name.removeprefix(hub.CACHED).replace("--", "/")] = folder
    return found


def _newest_snapshot(repo: Path) -> Path | None:
    """Return the folder of a cached repository's main revision, or else of its newest one. OSError if unreadable."""
    main = repo / "refs" / "main"
    commit = main.read_text(errors="replace").strip() if main.is_file() else None
    try:
        snapshots = [folder for folder in (repo / "snapshots").iterdir() if folder.is_dir()]
    except (FileNotFoundError, NotADirectoryError):  # nothing was downloaded
        return None
    return max(snapshots, key=lambda folder: (folder.name == commit, folder.stat().st_mtime), default=None)


def _is_broken(folder: Path) -> bool:
    """Return whether a config in `folder` cannot be read."""
    for path in (folder / name for name in hub.CONFIGS):
        try:
            if os.path.lexists(path):
                read_json(path)
        except InputError:
            return True
    return False


def _is_supported(folder: Path) -> bool:
    try:
        hub.needed_folders(folder)
    except InputError:
        return False
    return True


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
