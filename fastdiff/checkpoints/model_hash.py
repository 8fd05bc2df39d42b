"""Two hashes of a model: of its denoiser's weights, as other tools compute it, and of all its files.

A PNG's settings hold the first ten digits of the first one. The SHA-256 of a large file is kept in
`~/.cache/fastdiff/hashes`, and holds until the file is written or replaced.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread

from fastdiff.checkpoints import hub, weight_files
from fastdiff.checkpoints.json_files import parse_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.execution import temporaries

_CHUNK = 2**22
_LARGE = 2**26  # bytes of a file whose hash is kept
_lock, _begun = Lock(), dict[tuple, "Future[str]"]()  # by the states of the files
_TEXTS = ("*.json", "*.txt")  # configs, and the vocabularies of tokenizers


def begin_hash(card: ModelCard, variant: str | None) -> "Future[str]":
    """Start to compute the SHA-256 of the denoiser's weights, in hexadecimal digits. Shards count as one file.

    It runs in a thread beside the first steps: gigabytes take seconds, and no picture is finished before that. The
    future raises OSError if a file cannot be read any more. This function raises InputError if weights are missing.
    """
    if card.file is not None:
        return begin_sha256([card.file])
    return begin_weights_hash(hub.component_folder(card.folder, card.denoiser.name), variant)


def begin_weights_hash(folder: Path, variant: str | None) -> "Future[str]":
    """Begin to compute the SHA-256 of the weights in a model's own folder. As `begin_hash` otherwise."""
    return begin_sha256([file.path for file in weight_files.find(folder, variant)])


def begin_sha256(paths: Sequence[Path]) -> "Future[str]":
    """Begin to compute the SHA-256 of files, as if they were one file. The future is as in `begin_hash`.

    A process reads files that do not change only once. The hash of one large file is also kept for other processes.
    """
    state = tuple(state_of(path) for path in paths)
    with _lock:
        digits = _begun.get(state)
        if digits is None or (digits.done() and digits.exception()):
            digits = _begun[state] = _in_thread(lambda: _kept_sha256(paths[0]) if len(paths) == 1 else _sha256(paths))
    return digits


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits. Raises OSError if it cannot be read."""
    return begin_sha256([path]).result()


def known_hash(path: Path) -> str | None:
    """Return the SHA-256 of a file if the file is small or the hash was computed before. Raises as `file_hash`."""
    begun = _begun.get((state_of(path),))
    if begun is not None:
        return begun.result() if begun.done() and begun.exception() is None else None
    return file_hash(path) if os.path.getsize(path) < _LARGE else _kept(path)


def begin_known(paths: Sequence[Path]) -> None:
    """Begin to compute the hashes of files, one after the other, for `known_hash`."""

    def compute() -> str:
        for path in paths:
            with contextlib.suppress(OSError):
                file_hash(path)
        return ""

    _in_thread(compute)


def begin_files_hash(card: ModelCard, variant: str | None, more: Sequence[Path] = ()) -> "Future[str]":
    """Start to compute a SHA-256 of the names and contents of all files of the model, in hexadecimal digits.

    Folders with equal files have equal hashes, wherever they are. `more` files follow in their order. The rest is as in
    `begin_hash`.
    """
    paths = [*sorted(find_files(card, variant)), *more]
    return _in_thread(lambda: _sha256_of_folder(card.folder, paths))


def _in_thread(compute: Callable[[], str]) -> "Future[str]":
    """Begin to compute in a thread that a process does not wait for when it ends."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def state_of(path: Path) -> tuple[str, int, int, int, int]:
    """Return what changes whenever a file is written or replaced. Raises OSError if the file is not there."""
    found = os.stat(path)
    return str(path.absolute()), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def find_files(card: ModelCard, variant: str | None) -> set[Path]:
    """Return the files of the model: weights, configs and vocabularies. InputError if weights are missing."""
    needed = hub.needed_folders(card.folder)
    folders = {card.folder, *needed.models, *needed.tokenizers, hub.component_folder(card.folder, "scheduler")}
    paths = {path for folder in folders for kind in _TEXTS for path in folder.glob(kind)}
    inside = {card.folder / name for name in card.weights} if card.weights else set()
    for folder, library in needed.models.items():
        if folder in inside:
            continue
        paths |= {file.path for file in weight_files.find(folder, variant, library)}
    return paths | {each.path for each in card.weights.values()}


def _sha256_of_folder(root: Path, paths: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name  # a single file
        found.update(f"{name} {_sha256([path])}\n".encode())
    return found.hexdigest()


def _sha256(paths: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):  # hashing a large chunk releases the GIL
                found.update(chunk)
    return found.hexdigest()


def _kept_sha256(path: Path) -> str:
    """Return the SHA-256 of a file. That of a large file comes from the disk if an earlier process computed it."""
    if os.path.getsize(path) < _LARGE:
        return _sha256([path])
    state, known = state_of(path), _kept(path)
    if known is not None:
        return known
    digits = _sha256([path])
    with contextlib.suppress(OSError, ValueError):
        place = _place_of_hash(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporaries.holding(place.parent, json.dumps([*state, digits]).encode()) as written:
            os.replace(written, place)
    return digits


def _kept(path: Path) -> str | None:
    """Return the SHA-256 of a file that an earlier process kept on the disk, or None."""
    with contextlib.suppress(OSError, ValueError):
        *state, digits = parse_json(_place_of_hash(path).read_bytes().decode())
        if state == list(state_of(path)) and isinstance(digits, str):
            return digits
    return None


def _place_of_hash(path: Path) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "fastdiff", "hashes", hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32])
