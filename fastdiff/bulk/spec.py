"""The file of `--spec`: one row per label or prompt, with a seed and a number of pictures. Imports no torch.

A .json file holds a list of objects, a .jsonl file one object per line, and a .csv file a header and one row per line.
The names are label or prompt, seed, num_images, image and strength. The run's values replace those that a row leaves
out. An image is a file, relative to the folder of the spec.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastdiff.arguments import naming, shown
from fastdiff.checkpoints.json_files import parse_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_PICTURES, MAX_SEED, Fraction, Label, Pictures, Prompt, Seed
from fastdiff.requests.completion import Cell, begin, complete, label_cells, seeds_from, sized_as
from fastdiff.requests.defaults import BULK, SEED
from fastdiff.requests.input_picture import InputPicture, Start
from fastdiff.requests.prompt_file import read_text
from fastdiff.requests.request import FileName, Request
from fastdiff.schema import Wanted, checked

NAMES = ("label", "prompt", "seed", "num_images", "image", "strength")
_KINDS: Mapping[str, Any] = {
    "label": Annotated[Label | str | None, Wanted("the name or index of a label")],
    "prompt": Prompt | None,
    "seed": Seed | None,
    "num_images": Pictures | None,
    "image": FileName | None,
    "strength": Fraction | None,
}


@dataclass(frozen=True)
class Row:
    """A row of the file. None means the run's value."""

    label: int | str | None = None
    prompt: str | None = None
    seed: int | None = None
    num_images: int | None = None
    image: str | None = None  # a path
    strength: float | None = None


def read_rows(path: str) -> list[Row]:
    """Return the rows of a .json, .jsonl or .csv file. InputError names a row that cannot be used."""
    parse = {".json": _json, ".jsonl": _json_lines, ".csv": _csv}.get(Path(path).suffix.lower())
    if parse is None:
        raise InputError(f"spec {shown(path)} is not a .json, .jsonl or .csv file; give one")
    text = read_text(path, "spec", "a .json, .jsonl or .csv file of labels or prompts", "one row per label or prompt")
    try:
        values = list(parse(text))
    except (ValueError, csv.Error) as error:
        raise InputError(f"spec {path} cannot be read ({error}); correct it") from None
    if not values:
        raise InputError(f"spec {path} has no rows; write one per label or prompt")
    with naming(f"spec {path}"):
        rows = [_row(number, value) for number, value in enumerate(values, 1)]
    folder = Path(path).parent
    return [row if row.image is None else replace(row, image=str(folder / row.image)) for row in rows]


def _json(text: str) -> Iterable[Any]:
    values = parse_json(text)
    if not isinstance(values, list):
        raise ValueError("it is not a list of objects")
    return values


def _json_lines(text: str) -> Iterable[Any]:
    return [parse_json(line) for line in text.split("\n") if line.strip()]


def _csv(text: str) -> Iterable[Any]:
    for row in csv.DictReader(io.StringIO(text, newline=""), strict=True):
        if None in row or None in row.values():
            raise ValueError(f"a row has more or fewer values than the header: {shown(list(row.values()))}")
        given = {name: value for name, value in row.items() if value}
        whole = {name: _number(given[name]) for name in given.keys() & {"seed", "num_images"}}
        yield given | whole | {name: _decimal(given[name]) for name in given.keys() & {"strength"}}


def _number(text: str) -> Any:
    return int(text) if text.isdecimal() and len(text) <= len(str(MAX_SEED)) else text


def _decimal(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _row(number: int, value: Any) -> Row:
    if not isinstance(value, dict):
        raise InputError(f"row {number}: {shown(value)} is not an object; write names and values")
    unknown = sorted(map(str, value.keys() - set(NAMES)))
    if unknown:
        raise InputError(f"row {number}: unknown {', '.join(unknown)}; a row has {', '.join(NAMES)}")
    row = Row(**{name: checked(f"row {number}: {name}", each, _KINDS[name]) for name, each in value.items()})
    if row.label is not None and row.prompt is not None:
        raise InputError(f"row {number}: has both label and prompt; leave one out")
    return row


def complete_rows(
    request: Request, rows: list[Row], card: ModelCard, *, pixels: bool = True
) -> tuple[Request, list[Cell]]:
    """Return `request` completed as in `complete`, and the pictures of the rows, in order. InputError as there.

    pixels: whether to decode the rows' pictures, which finds damage before anything is drawn.

    The request gives the seed and number of pictures for rows without them. It has no labels or prompts.
    """
    if request.label or request.prompt:
        raise InputError("spec: cannot be used with --label, --prompt or --prompt-file; leave one out")
    if not isinstance(request.seed, int):
        raise InputError("seed: --spec takes a single seed; give --seed a number, or put a seed in each row")
    labels = tuple(dict.fromkeys(row.label for row in rows if row.label is not None))
    prompts = tuple(dict.fromkeys(row.prompt for row in rows if row.prompt is not None))
    if (labels or prompts) and not all(row.label is not None or row.prompt is not None for row in rows):
        raise InputError("spec: some rows have no label or prompt and others do; give each row one")
    pictures = _pictures(rows, pixels)
    first = replace(request, label=labels[:1], prompt=prompts[:MAX_PICTURES], seed=SEED, num_images=1)
    if pictures:
        first = _sized(first, list(pictures.values()), card)
        first = first if first.init_image else replace(first, strength=None)
    completed, (cell, *_) = complete(first, card, BULK)
    for what, has, given in (("label", completed.label, labels), ("prompt", completed.prompt, prompts)):
        if has and not given:
            raise InputError(f"spec: {card.name} draws from {what}s, and no row has one; give each row a {what}")
    cells: list[Cell] = []
    for number, row in enumerate(rows, 1):
        picture = cell.start.picture if row.image is None and cell.start else pictures.get(row.image or "")
        strength = request.strength if row.strength is None and picture else row.strength
        with naming(f"spec: row {number}"):
            start = begin(picture, strength, completed.num_inference_steps or 0, card)
        cells += _cells(row, request, card, BULK.most_pictures - len(cells), start)
    return completed, cells


def _pictures(rows: list[Row], pixels: bool) -> dict[str, InputPicture]:
    """Return the pictures that rows start from, by path, each read once."""
    found: dict[str, InputPicture] = {}
    for number, row in enumerate(rows, 1):
        if row.image is not None and row.image not in found:
            found[row.image] = InputPicture.read(row.image, f"spec: row {number}: image", pixels=pixels)
    return found


def _sized(request: Request, pictures: list[InputPicture], card: ModelCard) -> Request:
    """Return the request with the size of the pictures. Raises InputError for pictures of several sizes."""
    if not card.reads_text:
        raise InputError(f"{pictures[0].setting}: {card.name} has no text encoder; leave it out")
    first = pictures[0]
    other = next((each for each in pictures if each.size != first.size), None)
    if other is not None and None in (request.height, request.width):
        sizes = ["{} x {}".format(*each.size) for each in (other, first)]
        raise InputError(
            f"{other.setting} {shown(other.name)} is {sizes[0]}, and the first picture is {sizes[1]}; give --height and"
            " --width, and all become this size"
        )
    return sized_as(first, request, card)


def _cells(row: Row, request: Request, card: ModelCard, most: int, start: Start | None) -> list[Cell]:
    assert isinstance(request.seed, int)
    first = request.seed if row.seed is None else row.seed
    count = row.num_images or request.num_images or 1
    seeds = seeds_from(first, count)
    if count > most:
        raise InputError(f"spec: more than {BULK.most_pictures} pictures; split it into several runs")
    if row.label is not None:
        return label_cells(card, card.info.label_choices(row.label, card.config.num_class_embeds), seeds)
    return [Cell(seed, None, None, row.prompt, start) for seed in seeds]
