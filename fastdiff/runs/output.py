"""The files of a run. Every path is checked before the first picture is drawn."""

import io
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.errors import InputError
from fastdiff.execution import temporaries
from fastdiff.requests import png
from fastdiff.requests.completion import Cell
from fastdiff.requests.defaults import DEVICE
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
    """The path of each picture and of the grid.

    A run never replaces a file, except with `overwrite`. If a name is taken, the next free one of a.png, a-2.png ... is
    used.
    """

    paths: Sequence[Path]  # of the run's pictures, in order
    overwrite: bool = False
    grid: Path | None = None  # None: not requested, or already there
    columns: int = 1  # of the grid
    kept: Mapping[int, dict[str, Any]] = field(default_factory=dict)  # settings of pictures that exist, by place
    asked: Sequence[Path] = ()  # the pictures' names without numbers, if some have numbers
    embeds: bool = False  # whether the PNGs hold the picture that the run starts from, and its mask

    @classmethod
    def check(
        cls,
        run: Run,
        out: str,
        *,
        device: str = DEVICE,
        overwrite: bool = False,
        resume: bool = False,
        grid: str | bool = False,
        embeds: bool = False,
    ) -> "Output":
        """Choose and check the paths of a run. A trajectory has a .npy beside its PNG.

        Files that exist with the run's own settings are kept; see `runs.resuming`. Raises InputError for a path that
        cannot be written and, with `resume`, for an existing file with other settings.

        Args:
            out: a folder, a PNG file or a pattern.
            device: where the run draws, which decides its dtype.
            grid: a file, or True for grid.png beside the first picture.
            embeds: whether the PNGs hold the picture that the run starts from, and its mask.
        """
        plans = run.card.config.of_trajectories
        if plans and (resume or grid):
            raise InputError(f"{'--resume' if resume else '--grid'}: {run.card.name} draws trajectories; leave it out")
        if embeds:
            _check_inputs(run)
        pattern = files.as_pattern(out, run.request.subject)
        asked = files.picture_paths(pattern, run.cells, cell_names(run.cells, run.card.info))
        files.check([*asked, *map(trajectory_path, asked if plans else ())])
        columns = columns_of(run)
        sheet = _grid_path(run, asked, columns, grid) if grid else None
        if overwrite or not any(map(_is_taken, filter(None, (*asked, sheet)))):
            return cls(asked, overwrite, sheet, columns, embeds=embeds)
        run = resuming.with_number_format(run, device)
        if resume:
            kept = resuming.find_pictures(run, asked)
            has_grid = sheet is not None and resuming.has_grid(run, sheet, columns)
            return cls(asked, False, None if has_grid else sheet, columns, kept, embeds=embeds)
        since = resuming.last_change(run)
        paths, kept = _choose(run, asked, since)
        if sheet is not None:
            sheet = _choose_grid(run, sheet, paths, columns, since)
        files.check([path for path, first in zip(paths, asked, strict=True) if path != first])
        return cls(paths, False, sheet, columns, kept, asked, embeds)

    @property
    def missing(self) -> list[int]:
        """The places of the pictures that are still to be drawn."""
        return [place for place in range(len(self.paths)) if place not in self.kept]

    def notices(self) -> list[str]:
        """Return a line if pictures get other names, because files with theirs exist."""
        moved = [place for place in self.missing if self.asked and self.paths[place] != self.asked[place]]
        if not moved:
            return []
        first, new = self.asked[moved[0]], self.paths[moved[0]]
        if len(moved) == 1:
            return [f"{first} exists with other contents and stays; the new file is {new}"]
        return [f"{len(moved)} files exist with other contents and stay; the new files have numbers, such as {new}"]

    def remove_abandoned(self) -> None:
        """Remove the temporary files that killed processes left in the folders of this run."""
        for folder in {path.parent for path in (*self.paths, *filter(None, [self.grid]))}:
            temporaries.remove_abandoned(folder)

    def write(self, finished: Finished) -> Path:
        """Write a PNG with its settings, after the .npy of a trajectory. OSError with a one-line message.

        Returns its path. If another process took the name since the check, this is another name, or the same one if
        the other process wrote the same picture.
        """

        inputs = self._inputs(finished.cell)

        def write(path: Path) -> None:
            beside = trajectory_path(path)
            if finished.trajectory is not None:
                files.write(beside, _npy(finished.trajectory), self.overwrite)
            try:
                files.write(path, png.encode(finished.image, finished.record, inputs), self.overwrite)
            except FileExistsError:
                if finished.trajectory is not None:
                    beside.unlink(missing_ok=True)
                raise

        return self._write_new(
            (self.asked or self.paths)[finished.place], self.paths[finished.place], write, finished.record
        )

    def write_grid(self, path: Path, sheet: "Image", run: Run, record: Mapping[str, Any]) -> Path:
        """Write the `sheet` of all pictures. `record` is the settings of one of them. The rest is as in `write`."""
        own = {**resuming.grid_settings(run), "width": sheet.width, "height": sheet.height}
        of_pictures = {f"{PICTURE}{side}": record[side] for side in ("width", "height")}
        settings = {**record, **of_pictures, **own}
        data = png.encode(sheet, settings, self._inputs(run.cells[0]))
        return self._write_new(path, path, lambda path: files.write(path, data, self.overwrite), settings)

    def _inputs(self, cell: Cell) -> dict[str, bytes]:
        """Return the files that the PNG of a picture holds, by setting."""
        return {each.stored: each.data() for given in cell.given for each in given.pictures} if self.embeds else {}

    def _write_new(self, first: Path, path: Path, write: Callable[[Path], None], record: Mapping[str, Any]) -> Path:
        """Call `write` with `path`, or with the next of the names from `first` on that is free. Return it."""
        for name in itertools.dropwhile(lambda name: name != path, files.numbered(first)):
            try:
                write(name)
            except FileExistsError:
                if not resuming.holds(name, record):
                    continue
            return name
        raise AssertionError("names never end")


def _check_inputs(run: Run) -> None:
    """Raise InputError if what a run starts from is missing, or too large for a place inside a PNG."""
    pictures = [picture for given in run.cells[0].given for picture in given.pictures]
    if not pictures:
        raise InputError("--embed-inputs: the run starts from no picture; give --init-image, or leave it out")
    for picture in pictures:
        png.check_input(picture.name, len(picture.data()))


def _is_taken(path: Path) -> bool:
    """Return whether a file has the name of a picture, or of the trajectory beside it."""
    return os.path.lexists(path) or os.path.lexists(trajectory_path(path))


def _choose(run: Run, asked: Sequence[Path], since: int) -> tuple[list[Path], dict[int, dict[str, Any]]]:
    """Return the path of each picture, and by place the settings of the pictures that exist.

    The path is the first of its numbered names that is free or holds the picture. It is no name of another picture.
    """
    plans = run.card.config.of_trajectories
    reserved = {files.file_key(path) for path in asked}
    paths: list[Path] = []
    kept: dict[int, dict[str, Any]] = {}
    for place, (first, cell) in enumerate(zip(asked, run.cells, strict=True)):
        for path in files.numbered(first):
            if path != first and files.file_key(path) in reserved:
                continue
            if not (_is_taken(path) if plans else os.path.lexists(path)):
                break
            record = resuming.find_same(run, path, cell, since)
            if record is not None and (not plans or trajectory_path(path).is_file()):
                kept[place] = record
                break
        reserved.add(files.file_key(path))
        paths.append(path)
    return paths, kept


def _choose_grid(run: Run, first: Path, pictures: Sequence[Path], columns: int, since: int) -> Path | None:
    """Return the first numbered name of the grid that is free, or None if the grid exists."""
    reserved = {files.file_key(path) for path in pictures}
    for path in files.numbered(first):
        if files.file_key(path) in reserved:
            continue
        if not os.path.lexists(path):
            return path
        if resuming.is_same_grid(run, path, columns, since):
            return None
    raise AssertionError("names never end")


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


def _grid_path(run: Run, paths: Sequence[Path], columns: int, name: str | bool) -> Path:
    grid = paths[0].parent / "grid.png" if isinstance(name, bool) else files.grid_path(name)
    if any(files.file_key(path) == files.file_key(grid) for path in paths):
        raise InputError(f"the grid and a picture would both be {grid}; choose another file with --grid")
    files.check([grid], "--grid")
    if run.size:
        sheet_size(len(paths), columns, run.size)
    kept = run.request.as_record() | resuming.grid_settings(run)
    if len(png.canonical_json(kept)) > png.MAX_TEXT - _REST:
        raise InputError("--grid: the prompts are too long for the settings of one PNG; leave it out")
    return grid
