"""The contact sheet of `--grid`: all pictures of a run in one picture."""

import math
from typing import TYPE_CHECKING

from fastdiff.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SHEET_PIXELS = 2**27  # below the 2^27.4 at which Pillow refuses a picture as a decompression bomb
_MARGIN = 2  # pixels between the pictures


def grid_columns(num_labels: int, num_seeds: int) -> int:
    """Return the columns of a grid with one row per label; near-square if there is only one label or seed."""
    if num_labels > 1 and num_seeds > 1:
        return num_seeds
    return math.ceil(math.sqrt(max(1, num_labels) * num_seeds))


def sheet_size(count: int, columns: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) in pixels of a sheet of `count` pictures of `size`, (width, height).

    InputError if the sheet has more than MAX_SHEET_PIXELS.
    """
    lines = -(-count // columns)
    width, height = (n * (side + _MARGIN) + _MARGIN for n, side in zip((columns, lines), size, strict=True))
    if width * height > MAX_SHEET_PIXELS:
        raise InputError(f"a grid of {count} pictures would be {width}x{height} pixels; leave out --grid")
    return width, height


class ContactSheet:
    """One picture of all pictures of a run, filled as they are drawn."""

    def __init__(self, count: int, columns: int) -> None:
        self.count, self.columns = count, columns
        self.image: Image | None = None  # created by the first paste, from its size and mode

    def paste(self, place: int, picture: "Image") -> None:
        """Put `picture` at `place`, counted row by row."""
        from PIL.Image import new

        if self.image is None:
            self.image = new(picture.mode, sheet_size(self.count, self.columns, picture.size), "white")
        line, column = divmod(place, self.columns)
        width, height = (side + _MARGIN for side in picture.size)
        self.image.paste(picture, (_MARGIN + column * width, _MARGIN + line * height))
