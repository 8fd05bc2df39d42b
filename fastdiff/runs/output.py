"""The files of a run. Every path is checked before the first picture is drawn."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.errors import InputError
from fastdiff.execution import temporaries
from fastdiff.requests import png
from fastdiff.requests.request import PICTURE
from fastdiff.runs import files, resuming
from fastdiff.runs.drawing import Finished, Run
from fastdiff.runs.names import cell_names
from fastdiff.runs.sheet import grid_columns, sheet_size

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_REST = 2**12  # bytes of settings known only after drawing: the device, versions, sizes


@dataclass(frozen=True)
class Output:
    """The path of each picture and of the grid."""

    paths: Sequence[Path]  # of the run's cells, in order
    overwrite: bool = False
    grid: Path | None = None  # None: not requested, or already there
    columns: int = 1  # of the grid
    kept: Mapping[int, dict[str, Any]] = field(default_factory=dict)  # settings of pictures that exist, by place

    @classmethod
    def check(
        cls, run: Run, out: str, *, overwrite: bool = False, resume: bool = False, grid: str | bool = False
    ) -> "Output":
        """Choose and check the paths of a run. A trajectory has a .npy beside its PNG.

        Raises InputError for a path that cannot be written, and for an existing file that may not be replaced or kept.

        Args:
            out: a folder, a PNG file or a pattern.
            resume: keep the files whose settings are those that this run would write; see `runs.resuming`.
            grid: a file, or True for grid.png beside the first picture.
        """
        plans = run.card.config.of_trajectories
        if plans and (resume or grid):
            raise InputError(f"{'--resume' if resume else '--grid'}: {run.card.name} draws trajectories; leave it out")
        pattern = files.as_pattern(out, run.request.subject)
        paths = files.picture_paths(pattern, run.cells, cell_names(run.cells, run.card.info))
        files.check(paths, may_exist=overwrite or resume, may_resume=not plans)
        if plans:
            files.check([trajectory_path(path) for path in paths], may_exist=overwrite, may_resume=False)
        columns = columns_of(run)
        sheet = _grid_path(run, paths, columns, overwrite or resume, grid) if grid else None
        if not resume:
            return cls(paths, overwrite, sheet, columns)
        kept = resuming.find_pictures(run, paths)
        return cls(paths, overwrite, None if sheet and resuming.has_grid(run, sheet, columns) else sheet, columns, kept)

    @property
    def missing(self) -> list[int]:
        """The places of the pictures that are still to be drawn."""
        return [place for place in range(len(self.paths)) if place not in self.kept]

    def remove_abandoned(self) -> None:
        """Remove the temporary files that killed processes left in the folders of this run."""
        for folder in {path.parent for path in (*self.paths, *filter(None, [self.grid]))}:
            temporaries.remove_abandoned(folder)

    def write(self, finished: Finished) -> Path:
        """Write a PNG with its settings, after the .npy of a trajectory. OSError with a one-line message."""
        path = self.paths[finished.place]
        if finished.trajectory is not None:
            files.write(trajectory_path(path), _npy(finished.trajectory), self.overwrite)
        files.write(path, png.encode(finished.image, finished.record), self.overwrite)
        return path

    def write_grid(self, path: Path, sheet: "Image", run: Run, record: Mapping[str, Any]) -> Path:
        """Write the `sheet` of all pictures. `record` is the settings of one of them. OSError as in `write`."""
        own = {**resuming.grid_settings(run), "width": sheet.width, "height": sheet.height}
        of_pictures = {f"{PICTURE}{side}": record[side] for side in ("width", "height")}
        files.write(path, png.encode(sheet, {**record, **of_pictures, **own}), self.overwrite)
        return path


def columns_of(run: Run) -> int:
    """Return the number of columns in the grid of a run."""
    num_subjects = len(run.request.subjects)
    return grid_columns(num_subjects, len(run.cells) // max(1, num_subjects))


def trajectory_path(plot: Path) -> Path:
    """Return the file of a trajectory, beside its plot."""
    return plot.with_suffix(".npy")


def _npy(array: "np.ndarray") -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _grid_path(run: Run, paths: Sequence[Path], columns: int, may_exist: bool, name: str | bool) -> Path:
    grid = paths[0].parent / "grid.png" if isinstance(name, bool) else files.grid_path(name)
    if any(files.file_key(path) == files.file_key(grid) for path in paths):
        raise InputError(f"the grid and a picture would both be {grid}; choose another file with --grid")
    files.check([grid], may_exist, "--grid")
    if run.size:
        sheet_size(len(paths), columns, run.size)
    kept = run.request.as_record() | resuming.grid_settings(run)
    if len(png.canonical_json(kept)) > png.MAX_TEXT - _REST:
        raise InputError("--grid: the prompts are too long for the settings of one PNG; leave it out")
    return grid
