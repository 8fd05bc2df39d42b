"""The file of `--spec`: one row per label or prompt, with a seed and a number of pictures. Imports no torch.

A .json file holds a list of objects, a .jsonl file one object per line, and a .csv file a header and one row per line.
The names are label or prompt, seed and num_images. The run's values replace those that a row leaves out.
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
from fastdiff.kinds import MAX_PICTURES, MAX_SEED, Label, Pictures, Prompt, Seed
from fastdiff.requests.completion import Cell, complete, label_cells, seeds_from
from fastdiff.requests.defaults import BULK, SEED
from fastdiff.requests.prompt_file import read_text
from fastdiff.requests.request import Request
from fastdiff.schema import Wanted, checked

NAMES = ("label", "prompt", "seed", "num_images")
_KINDS: Mapping[str, Any] = {
    "label": Annotated[Label | str | None, Wanted("the name or index of a label")],
    "prompt": Prompt | None,
    "seed": Seed | None,
    "num_images": Pictures | None,
}


@dataclass(frozen=True)
class Row:
    """A row of the file. None means the run's value."""

    label: int | str | None = None
    prompt: str | None = None
    seed: int | None = None
    num_images: int | None = None


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
        return [_row(number, value) for number, value in enumerate(values, 1)]


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
        yield given | {name: _number(given[name]) for name in given.keys() & {"seed", "num_images"}}


def _number(text: str) -> Any:
    return int(text) if text.isdecimal() and len(text) <= len(str(MAX_SEED)) else text


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


def complete_rows(request: Request, rows: list[Row], card: ModelCard) -> tuple[Request, list[Cell]]:
    """Return `request` completed as in `complete`, and the pictures of the rows, in order. InputError as there.

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
    first = replace(request, label=labels[:1], prompt=prompts[:MAX_PICTURES], seed=SEED, num_images=1)
    completed, _ = complete(first, card, BULK)
    for what, has, given in (("label", completed.label, labels), ("prompt", completed.prompt, prompts)):
        if has and not given:
            raise InputError(f"spec: {card.name} draws from {what}s, and no row has one; give each row a {what}")
    cells: list[Cell] = []
    for row in rows:
        cells += _cells(row, request, card, BULK.most_pictures - len(cells))
    return completed, cells


def _cells(row: Row, request: Request, card: ModelCard, most: int) -> list[Cell]:
    assert isinstance(request.seed, int)
    first = request.seed if row.seed is None else row.seed
    count = row.num_images or request.num_images or 1
    seeds = seeds_from(first, count)
    if count > most:
        raise InputError(f"spec: more than {BULK.most_pictures} pictures; split it into several runs")
    if row.label is not None:
        return label_cells(card, card.info.label_choices(row.label, card.config.num_class_embeds), seeds)
    return [Cell(seed, None, None, row.prompt) for seed in seeds]
