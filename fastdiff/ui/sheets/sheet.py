"""An X/Y sheet: the pictures of two axes, each as Draw draws it, and one PNG of all that restores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL.Image import Image

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.request import AXES, PICTURE
from fastdiff.runs import files
from fastdiff.runs.drawing import Finished, Progress, Run
from fastdiff.ui.drawn import Drawn, draw
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models
from fastdiff.ui.options import Options, prepare
from fastdiff.ui.sheets.axes import Axes, caption
from fastdiff.ui.sheets.layout import draw_captions


@dataclass(frozen=True)
class Group:
    """The pictures of a sheet that one run draws: they differ in seed, label and prompt alone."""

    run: Run
    places: Sequence[int]  # of its cells in the sheet, row by row
    name: str  # that its files begin with

    @property
    def steps(self) -> int:
        """The steps of all its pictures."""
        return len(self.places) * (self.run.request.num_inference_steps or 1)


@dataclass(frozen=True)
class Sheet:
    """The pictures of two axes, checked as far as they can be without torch."""

    axes: Axes
    groups: Sequence[Group]
    base: int  # the place of the picture whose settings the sheet's PNG has beside the axes
    base_label: str | int | None  # that was asked for: a group's label changes with the seed

    @property
    def runs(self) -> list[Run]:
        return [group.run for group in self.groups]


@dataclass(frozen=True)
class SheetProgress(Progress):
    """The state of a sheet after each step: `run` has all its cells, in the order of drawing."""

    share: float  # of the steps of all its pictures

    @property
    def fraction(self) -> float:
        return self.share


def prepare_sheet(options: Options, axes: Axes, models: Models, limits: Limits) -> Sheet:
    """The sheet of `options` with the values of the axes in their place. InputError as `prepare`."""
    columns, rows = axes.columns, axes.rows
    if columns * rows > limits.pictures:
        count = f"a sheet of {columns} x {rows} = {columns * rows} pictures"
        raise InputError(f"{count} is too large; a request draws up to {limits.pictures}")
    settings = axes.settings()
    runs = [prepare(_with(options, each), models, limits) for each in settings]
    places: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        places.setdefault(png.canonical_json(run.request.as_record()), []).append(place)
    groups = [_group([runs[place] for place in each], each, settings[each[0]]) for each in places.values()]
    models.budget.check(*(group.run for group in groups))
    base = next((place for place, run in enumerate(runs) if run.request.eta is not None), 0)
    return Sheet(_with_full_labels(axes, runs), groups, base, next(iter(runs[base].request.label), None))


def _with(options: Options, settings: Mapping[str, Any]) -> Options:
    """The options of one picture."""
    options = replace(options, num_images=1, **settings)
    return options if options.scheduler == "ddim" else replace(options, eta=None)


def _group(runs: Sequence[Run], places: Sequence[int], settings: Mapping[str, Any]) -> Group:
    cells = [cell for run in runs for cell in run.cells]
    request = replace(
        runs[0].request,
        seed=tuple(dict.fromkeys(cell.seed for cell in cells)),
        label=tuple(dict.fromkeys(label for run in runs for label in run.request.label)),
        prompt=tuple(dict.fromkeys(prompt for run in runs for prompt in run.request.prompt)),
    )
    shared = {name: value for name, value in settings.items() if name in ("steps", "guidance_scale", "scheduler")}
    name = "".join(f"{caption(*each)}-".replace(" ", "-") for each in shared.items())
    return Group(replace(runs[0], request=request, cells=cells), places, name)


def _with_full_labels(axes: Axes, runs: Sequence[Run]) -> Axes:
    """The axes with their labels as the model names them."""
    labels = [label for run in runs for label in run.request.label]
    if axes.x and axes.x.name == "label":
        axes = replace(axes, x=replace(axes.x, values=tuple(labels[: axes.columns])))
    if axes.y and axes.y.name == "label":
        axes = replace(axes, y=replace(axes.y, values=tuple(labels[:: axes.columns])))
    return axes


def draw_sheet(sheet: Sheet, models: Models, folder: Path) -> Iterator[tuple[Progress, list[Drawn]]]:
    """Draw the pictures of `sheet` into `folder`, then sheet.png. Yields and raises as `draw`."""
    whole = replace(sheet.runs[0], cells=[cell for run in sheet.runs for cell in run.cells])
    total, seconds, first, steps = sum(group.steps for group in sheet.groups), 0.0, 0, 0
    finished: dict[int, Finished] = {}
    for count, group in enumerate(sheet.groups):
        models.budget.check(*sheet.runs[count:], spent=seconds)
        for progress, drawn in draw(group.run, models, folder, group.name):
            finished |= {group.places[each.place]: each for each in progress.finished}
            places = range(first + progress.places.start, first + progress.places.stop)
            share = (steps + progress.fraction * group.steps) / total
            now = seconds + progress.seconds
            at = SheetProgress(whole, places, progress.step, now, progress.finished, share)
            yield at, drawn
        seconds, first, steps = now, first + len(group.places), steps + group.steps
    axes, pictures = sheet.axes, [finished[place].image for place in sorted(finished)]
    columns, rows = (axis.captions if axis else [""] for axis in (axes.x, axes.y))
    image = draw_captions(pictures, columns, rows)
    record = _record(sheet, finished[sheet.base].record, image)
    files.write(folder / "sheet.png", png.encode(image, record), overwrite=False)
    yield at, [Drawn(folder / "sheet.png", record)]


def _record(sheet: Sheet, base: Mapping[str, Any], image: Image) -> dict[str, Any]:
    """The settings of the sheet: those of its `base` picture, and the axes."""
    of_pictures = {f"{PICTURE}{side}": base[side] for side in ("width", "height")}
    own = {"label": sheet.base_label, "width": image.width, "height": image.height, AXES: sheet.axes.as_record()}
    return {**base, **of_pictures, **own}
