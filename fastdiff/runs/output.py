"""The files of a run: every place is checked before the first picture is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.runs import files
from fastdiff.runs.drawing import Finished, Run
from fastdiff.runs.sheet import grid_columns, sheet_size

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Output:
    """The place of each picture, and of the grid."""

    paths: Sequence[Path]  # of the run's cells, in order
    overwrite: bool = False
    grid: Path | None = None
    columns: int = 1  # of the grid

    @classmethod
    def check(cls, run: Run, out: str, *, overwrite: bool, grid: str | bool) -> "Output":
        """`out` is a folder, a PNG file or a pattern; `grid` a file, or True for grid.png beside the first picture.

        InputError for what cannot be written.
        """
        pattern = files.as_pattern(out, with_labels=bool(run.request.label))
        paths = files.picture_paths(pattern, run.cells, overwrite)
        num_labels = len(run.request.label)
        columns = grid_columns(num_labels, len(run.cells) // max(1, num_labels))
        return cls(paths, overwrite, _grid_path(run, paths, columns, overwrite, grid) if grid else None, columns)

    def write(self, finished: Finished) -> Path:
        """Write a PNG that holds its settings. OSError with a one-line message."""
        path = self.paths[finished.place]
        files.write(path, png.encode(finished.image, finished.record), self.overwrite)
        return path

    def write_grid(self, path: Path, sheet: "Image", run: Run, record: Mapping[str, Any]) -> Path:
        """Write the `sheet` of all pictures; `record` is one of theirs. OSError as `write`."""
        seeds = list(dict.fromkeys(cell.seed for cell in run.cells))
        own = {"seed": seeds, "label": list(run.request.label) or None, "width": sheet.width, "height": sheet.height}
        files.write(path, png.encode(sheet, {**record, **own}), self.overwrite)
        return path


def _grid_path(run: Run, paths: Sequence[Path], columns: int, overwrite: bool, name: str | bool) -> Path:
    grid = paths[0].parent / "grid.png" if isinstance(name, bool) else files.grid_path(name)
    if any(files.file_key(path) == files.file_key(grid) for path in paths):
        raise InputError(f"the grid and a picture would both be {grid}; name another file with --grid")
    files.check([grid], overwrite, "--grid")
    if run.card.size:
        sheet_size(len(paths), columns, run.card.size)
    return grid
