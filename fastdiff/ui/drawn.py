"""Pictures that the page has drawn: finished PNG files of a run, and the grid of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdiff.errors import InputError
from fastdiff.runs import drawing, files
from fastdiff.runs.drawing import Progress, Run
from fastdiff.runs.names import cell_names
from fastdiff.runs.output import Output, columns_of
from fastdiff.runs.resuming import load_picture
from fastdiff.runs.sheet import ContactSheet
from fastdiff.runs.writing import write_beside
from fastdiff.ui.models import Models

INTERVAL = 0.1  # seconds between two steps that are told of: a GPU makes a thousand in a second


@dataclass(frozen=True)
class Drawn:
    """A finished picture: its PNG file, and the settings in it."""

    path: Path
    record: dict[str, Any]


def draw(run: Run, models: Models, folder: Path, start: str = "") -> Iterator[tuple[Progress, list[Drawn]]]:
    """Draw `run` into `folder`; file names begin with `start`.

    Yields after steps, with the files whole by then: after each that finishes pictures, and ten times a second between.

    Raises InputError, NonFiniteError, OSError where the disk refuses, MemoryError, DeviceLostError.
    """
    pipe = models.pipeline(run.card, run.request.scheduler, run.request.precision)
    pattern = files.default_pattern(run.request.subject)
    names = cell_names(run.cells, run.card.info)
    output = Output([folder / f"{start}{path}" for path in files.picture_paths(pattern, run.cells, names)])
    steps = models.budget.watch(models.in_turn(drawing.draw(run, pipe)))
    told = -INTERVAL
    for progress, drawn in write_beside(
        steps, lambda finished: Drawn(output.write(finished), finished.record), wait=pipe.device.type == "cpu"
    ):
        if drawn or progress.finished or progress.seconds >= told + INTERVAL:
            told = progress.seconds
            yield progress, drawn


def write_grid(run: Run, pictures: Sequence[Drawn]) -> Path:
    """Write the grid of the first pictures of `run` beside them, that of `fastdiff sample --grid`.

    InputError for a picture that was deleted, OSError where the disk refuses.
    """
    if not all(drawn.path.exists() for drawn in pictures):
        raise InputError("a picture of this run was deleted; draw it again for a grid")
    run = replace(run, cells=run.cells[: len(pictures)])
    sheet = ContactSheet(len(pictures), columns_of(run))
    for place, drawn in enumerate(pictures):
        sheet.paste(place, load_picture(drawn.path, drawn.record))
    output, path = Output([], overwrite=True), pictures[0].path.parent / "grid.png"
    return output.write_grid(path, sheet.image, run, pictures[-1].record)  # type: ignore[arg-type]  # there are some
