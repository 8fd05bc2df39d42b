"""The hash by which other tools tell models apart, of which a PNG's settings name ten digits, and that of all files."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from fastdiff.checkpoints import hub, weight_files
from fastdiff.checkpoints.model_card import ModelCard

_CHUNK = 2**22
_TEXTS = ("*.json", "*.txt")  # configs, and the vocabularies of tokenizers


def begin_hash(card: ModelCard, variant: str | None) -> "Future[str]":
    """Begin to compute the SHA-256 of the denoiser's weights, whose shards count as one file, in hexadecimal digits.

    It goes on beside the first steps: of gigabytes it takes seconds, and no picture is finished before that. Its result
    raises OSError where a file cannot be read any more. InputError for weights that are missing.
    """
    return begin_weights_hash(hub.component_folder(card.folder, card.denoiser.name), variant)


def begin_weights_hash(folder: Path, variant: str | None) -> "Future[str]":
    """Begin to compute the SHA-256 of the weights in a model's own folder. As `begin_hash` otherwise."""
    files = weight_files.find(folder, variant)
    thread = ThreadPoolExecutor(1)
    digits = thread.submit(_sha256, [file.path for file in files])
    thread.shutdown(wait=False)
    return digits


def begin_files_hash(card: ModelCard, variant: str | None) -> "Future[str]":
    """Begin to compute a SHA-256 of all files that the model is loaded from, by name and content; in hexadecimal.

    Folders of equal files have equal hashes wherever they are. As `begin_hash` otherwise.
    """
    needed = hub.needed_folders(card.folder)
    folders = {card.folder, *needed.models, *needed.tokenizers, hub.component_folder(card.folder, "scheduler")}
    paths = {path for folder in folders for kind in _TEXTS for path in folder.glob(kind)}
    for folder, library in needed.models.items():
        paths |= {file.path for file in weight_files.find(folder, variant, library)}
    thread = ThreadPoolExecutor(1)
    digits = thread.submit(_sha256_of_folder, card.folder, sorted(paths))
    thread.shutdown(wait=False)
    return digits


def _sha256_of_folder(root: Path, paths: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.relative_to(root).as_posix()} {_sha256([path])}\n".encode())
    return found.hexdigest()


def _sha256(paths: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):  # large ones let go of Python's lock
                found.update(chunk)
    return found.hexdigest()
