"""Convert a single file into a folder in diffusers' layout, as a whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.saving import writing
from fastdiff.checkpoints.single_files.cards import FileOptions, file_card
from fastdiff.checkpoints.single_files.reading import SingleFile, read_single_file
from fastdiff.errors import InputError
from fastdiff.pipelines.base import Pipeline

# The dtype of a folder's weights for the dtype of most of a part's tensors. float16 holds every value of fp8's e4m3.
_DTYPES = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float16"}


def convert_file(path: str | Path, out: str | Path, options: FileOptions) -> list[str]:
    """Convert a checkpoint into the new folder `out`, and return the card's notices.

    Each part keeps its dtype; fp8 becomes float16. The folder appears when it is complete.

    Raises:
        InputError: for a file that fastdiff cannot load, and if `out` exists or cannot be written.
        NonFiniteError: for NaN or infinity in the weights.
    """
    path, out = Path(path), Path(out)
    if os.path.lexists(out):
        raise InputError(f"{out} exists; give the name of a new folder")
    card = file_card(path, options)
    dtypes = {name: _dtype_of(read_single_file(inside.path), name) for name, inside in card.weights.items()}
    with _appearing(out) as folder:
        pipe = Pipeline.from_card(card, Load.of(device="cpu", dtype=dtypes))
        pipe.save_pretrained(folder)
    return card.notices


def _dtype_of(file: SingleFile, part: str) -> str:
    """Return the dtype of most of a part's weights."""
    first, *_ = file.precision(part).split(", ")
    return _DTYPES.get(first, "float32")


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `out` that gets the name `out` in the end, and is removed after an error."""
    folder = out.parent / f".{out.name}.{secrets.token_hex(4)}.part"
    try:
        yield folder
        with writing(out):
            folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
