"""Pictures that the page has drawn: finished PNG files of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.runs import drawing, files
from fastdiff.runs.drawing import Progress, Run
from fastdiff.runs.names import cell_names
from fastdiff.runs.output import Output
from fastdiff.ui.models import Models


@dataclass(frozen=True)
class Drawn:
    """A finished picture: its PNG file, and the settings in it."""

    path: Path
    record: dict[str, Any]


def draw(run: Run, models: Models, folder: Path) -> Iterator[tuple[Progress, list[Drawn]]]:
    """Draw `run` into `folder`. Yields after each step, the pictures of a batch at its end.

    Raises InputError, NonFiniteError, OSError where the disk refuses, MemoryError, DeviceLostError.
    """
    pipe = models.pipeline(run.card, run.request.scheduler)
    pattern = files.default_pattern(run.request.subject)
    names = cell_names(run.cells, run.card.info)
    output = Output([folder / path for path in files.picture_paths(pattern, run.cells, names)])
    for progress in models.budget.watch(drawing.draw(run, pipe)):
        yield progress, [Drawn(output.write(finished), finished.record) for finished in progress.finished]
