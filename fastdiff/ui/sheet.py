"""An X/Y sheet: one picture per pair of axis values, and a PNG of all with captions, which the page can restore."""

import math
import unicodedata
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio
from PIL import Image, ImageDraw, ImageFont

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.request import AXES, PICTURE
from fastdiff.runs import files
from fastdiff.runs.drawing import Finished, Progress, Run
from fastdiff.sampler_names import ETAS
from fastdiff.ui.drawing import Drawn, draw, inputs_of, prepare
from fastdiff.ui.inputs.axes import Axes, caption
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.shared import Shared

_FONT = Path(gradio.__file__).parent / "templates/frontend/static/fonts/SourceSansPro/SourceSansPro-Regular.woff2"
_SMALLEST, _SHARE = 13, 30  # font size in pixels: (width + height) / 30 of a picture, at least 13
_LETTERS = 8  # the minimum width of a column, in font sizes
_BESIDE = 12  # the maximum width of a row caption, in font sizes
_MOST_LINES = 6  # of a column caption


@dataclass(frozen=True)
class SheetGroup:
    """The pictures of a sheet that one run draws: they differ only in seed, label and prompt."""

    run: Run
    places: Sequence[int]  # positions of its cells in the sheet, row by row
    name: str  # the prefix of its file names

    @property
    def steps(self) -> int:
        """The total number of steps of its pictures."""
        return len(self.places) * (self.run.request.num_inference_steps or 1)


@dataclass(frozen=True)
class Sheet:
    """The pictures of two axes, checked as far as possible without torch."""

    axes: Axes
    groups: Sequence[SheetGroup]
    base: int  # the position of the picture whose settings the sheet's PNG records, beside the axes
    base_label: str | int | None  # as requested: the seed decides which label of a group is drawn

    @property
    def runs(self) -> list[Run]:
        return [group.run for group in self.groups]


@dataclass(frozen=True)
class SheetProgress(Progress):
    """The state of a sheet after each step: `run` has all its cells, in the order of drawing."""

    share: float = 0.0  # the finished fraction of all steps

    @property
    def fraction(self) -> float:
        return self.share


def prepare_sheet(asked: UncheckedRequest, axes: Axes, shared: Shared, limits: Limits) -> Sheet:
    """Return the sheet of a request, with the values of the axes filled in. Raises InputError like `prepare`."""
    asked = limits.check(replace(asked, num_images=1))
    columns, rows = axes.columns, axes.rows
    if columns * rows > limits.pictures:
        count = f"a sheet of {columns} x {rows} = {columns * rows} pictures"
        raise InputError(f"{count} is too large; the limit is {limits.pictures}")
    settings = axes.settings()
    runs = [prepare(_with(asked, each), shared, limits) for each in settings]
    places: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        places.setdefault(png.canonical_json(run.request.as_record()), []).append(place)
    groups = [_group([runs[place] for place in each], each, settings[each[0]]) for each in places.values()]
    shared.budget.check(*(group.run for group in groups))
    base = next((place for place, run in enumerate(runs) if run.request.eta is not None), 0)
    return Sheet(_with_full_labels(axes, runs), groups, base, next(iter(runs[base].request.label), None))


def _with(asked: UncheckedRequest, settings: Mapping[str, Any]) -> UncheckedRequest:
    """Return the request for one picture."""
    asked = replace(asked, **settings)
    return asked if asked.scheduler in ETAS else replace(asked, eta=None)


def _group(runs: Sequence[Run], places: Sequence[int], settings: Mapping[str, Any]) -> SheetGroup:
    cells = [cell for run in runs for cell in run.cells]
    request = replace(
        runs[0].request,
        seed=tuple(dict.fromkeys(cell.seed for cell in cells)),
        label=tuple(dict.fromkeys(label for run in runs for label in run.request.label)),
        prompt=tuple(dict.fromkeys(prompt for run in runs for prompt in run.request.prompt)),
    )
    shared = {name: value for name, value in settings.items() if name in ("steps", "guidance_scale", "scheduler")}
    name = "".join(f"{caption(*each)}-".replace(" ", "-") for each in shared.items())
    return SheetGroup(replace(runs[0], request=request, cells=cells), places, name)


def _with_full_labels(axes: Axes, runs: Sequence[Run]) -> Axes:
    """Return the axes with the labels spelled as the model names them."""
    labels = [label for run in runs for label in run.request.label]
    if axes.x and axes.x.name == "label":
        axes = replace(axes, x=replace(axes.x, values=tuple(labels[: axes.columns])))
    if axes.y and axes.y.name == "label":
        axes = replace(axes, y=replace(axes.y, values=tuple(labels[:: axes.columns])))
    return axes


def draw_sheet(sheet: Sheet, shared: Shared, folder: Path) -> Generator[tuple[Progress, list[Drawn]], None, None]:
    """Draw the pictures of `sheet` into `folder`, then sheet.png. Yields and raises like `draw`."""
    whole = replace(sheet.runs[0], cells=[cell for run in sheet.runs for cell in run.cells])
    total, seconds, spent, first, steps = sum(group.steps for group in sheet.groups), 0.0, 0.0, 0, 0
    finished: dict[int, Finished] = {}
    for count, group in enumerate(sheet.groups):
        shared.budget.check(*sheet.runs[count:], spent=spent)
        with closing(draw(group.run, shared, folder, group.name)) as drawing:
            for progress, drawn in drawing:
                finished |= {group.places[each.place]: each for each in progress.finished}
                places = range(first + progress.places.start, first + progress.places.stop)
                share = (steps + progress.fraction * group.steps) / total
                now, own = seconds + progress.seconds, spent + progress.seconds - progress.waited
                at = SheetProgress(whole, places, progress.step, now, progress.finished, share=share)
                yield at, drawn
        seconds, spent, first, steps = now, own, first + len(group.places), steps + group.steps
    axes, pictures = sheet.axes, [finished[place].image for place in sorted(finished)]
    columns, rows = (axis.captions if axis else [""] for axis in (axes.x, axes.y))
    image = draw_captions(pictures, columns, rows)
    record = _record(sheet, finished[sheet.base].record, image)
    inputs = {each.setting: each.data() for each in inputs_of(whole)}
    files.write(folder / "sheet.png", png.encode(image, record, inputs), overwrite=False)
    yield at, [Drawn(folder / "sheet.png", record)]


def _record(sheet: Sheet, base: Mapping[str, Any], image: Image.Image) -> dict[str, Any]:
    """Return the settings of the sheet: the settings of its `base` picture, and the axes."""
    of_pictures = {f"{PICTURE}{side}": base[side] for side in ("width", "height")}
    own = {"label": sheet.base_label, "width": image.width, "height": image.height, AXES: sheet.axes.as_record()}
    return {**base, **of_pictures, **own}


def draw_captions(pictures: Sequence[Image.Image], columns: Sequence[str], rows: Sequence[str]) -> Image.Image:
    """Return a sheet of equally large `pictures`, row by row, with captions. The pictures are not resized."""
    width, height = pictures[0].size
    letter = max(_SMALLEST, (width + height) // _SHARE)
    font, line, gap = _font(letter), math.ceil(1.3 * letter), letter // 2
    cell = max(width, _LETTERS * letter)
    above = [_wrap(text, cell, font, _MOST_LINES) for text in columns]
    beside = [_wrap(text, _BESIDE * letter, font, max(1, height // line)) for text in rows]
    longest = max((math.ceil(font.getlength(text)) for lines in beside for text in lines), default=0)
    left = longest + 2 * gap if longest else gap
    tallest = line * max(map(len, above))
    top = tallest + 2 * gap if tallest else gap
    size = left + len(columns) * (cell + gap), top + len(rows) * (height + gap)
    sheet = Image.new(pictures[0].mode, size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, lines in enumerate(above):
        x = left + i * (cell + gap) + cell / 2
        _write(draw, lines, x, top - gap - line * len(lines) / 2, line, font, "mm")
    for i, lines in enumerate(beside):
        _write(draw, lines, left - gap, top + i * (height + gap) + height / 2, line, font, "rm")
    for place, picture in enumerate(pictures):
        row, column = divmod(place, len(columns))
        sheet.paste(picture, (left + column * (cell + gap) + (cell - width) // 2, top + row * (height + gap)))
    return sheet


def _font(letter: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Gradio's font (Latin, Greek, Cyrillic), else Pillow's (ASCII). Other characters become boxes."""
    try:
        return ImageFont.truetype(_FONT, letter)
    except OSError:  # this FreeType cannot read WOFF2, or this Gradio has another font
        return ImageFont.load_default(letter)


def _write(
    draw: ImageDraw.ImageDraw,
    lines: Sequence[str],
    x: float,
    y: float,
    height: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    anchor: str,
) -> None:
    """Draw lines centered vertically on `y`."""
    for i, text in enumerate(lines):
        draw.text((x, y + (i - (len(lines) - 1) / 2) * height), text, "black", font, anchor=anchor)


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, most: int) -> list[str]:
    """Wrap a text to lines of at most `width` pixels. A text of more than `most` lines ends with an ellipsis."""
    lines = [""]
    for word in unicodedata.normalize("NFC", text).split():  # compose accented letters for the font
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
            continue
        lines += [""] if lines[-1] else []
        for letter in word:
            if font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    if len(lines) > most:
        lines = lines[:most]
        while lines[-1] and font.getlength(f"{lines[-1]}…") > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] += "…"
    return [each for each in lines if each]
