"""The hash by which other tools tell models apart: a PNG's settings name its first ten digits."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from fastdiff.checkpoints import hub, weight_files
from fastdiff.checkpoints.model_card import ModelCard

_CHUNK = 2**22


def begin_hash(card: ModelCard, variant: str | None) -> "Future[str]":
    """Begin to compute the SHA-256 of the denoiser's weights, whose shards count as one file, in hexadecimal digits.

    It goes on beside the first steps: of gigabytes it takes seconds, and no picture is finished before that. Its result
    raises OSError where a file cannot be read any more. InputError for weights that are missing.
    """
    files = weight_files.find(hub.component_folder(card.folder, card.denoiser.name), variant)
    thread = ThreadPoolExecutor(1)
    digits = thread.submit(_sha256, [file.path for file in files])
    thread.shutdown(wait=False)
    return digits


def _sha256(paths: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):  # large ones let go of Python's lock
                found.update(chunk)
    return found.hexdigest()
