"""Several pictures as one file: a ZIP, or a grid."""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

from fastdiff.errors import InputError
from fastdiff.runs.sheet import MAX_SHEET_PIXELS, ContactSheet

MOST_PIXELS = MAX_SHEET_PIXELS // 4  # of all pictures of a grid; margins and an incomplete last row add to them
GONE = "a picture was deleted; select the pictures again"


def write_zip(folder: Path, shelf: Path, paths: Sequence[Path], most: int) -> Path:
    """Write pictures of a shelf into FOLDER/pictures.zip, uncompressed, under their names on the shelf.

    most: bytes. Raises InputError for more, or if a picture is gone.
    """
    target = folder / "pictures.zip"
    try:
        if sum(path.stat().st_size for path in paths) > most:
            raise InputError(f"these pictures have more than {most / 2**20:,.0f} MiB; select fewer")
        with zipfile.ZipFile(target, "w", strict_timestamps=False) as file:
            for path in paths:
                file.write(path, path.relative_to(shelf).as_posix())
    except FileNotFoundError:
        target.unlink(missing_ok=True)
        raise InputError(GONE) from None
    return target


def write_grid(folder: Path, paths: Sequence[Path]) -> Path:
    """Write pictures into FOLDER/grid.png, row by row. Smaller ones stand in the middle of a cell of the largest size.

    Raises InputError if the grid would be too large, or if a picture is gone.
    """
    from PIL import Image

    try:
        sizes = [_size(path) for path in paths]
        cell = max(width for width, _ in sizes), max(height for _, height in sizes)
        if len(paths) * cell[0] * cell[1] > MOST_PIXELS:
            raise InputError(f"a grid of {len(paths)} pictures of this size is too large; select fewer")
        sheet = ContactSheet(len(paths), math.ceil(math.sqrt(len(paths))))
        for place, path in enumerate(paths):
            with Image.open(path) as picture:
                framed = Image.new("RGB", cell, "white")
                left, top = ((most - own) // 2 for most, own in zip(cell, picture.size, strict=True))
                framed.paste(picture.convert("RGB"), (left, top))
            sheet.paste(place, framed)
    except FileNotFoundError:
        raise InputError(GONE) from None
    assert sheet.image is not None  # at least one picture
    sheet.image.save(folder / "grid.png")
    return folder / "grid.png"


def _size(path: Path) -> tuple[int, int]:
    from PIL import Image

    with Image.open(path) as picture:
        return picture.size
