"""The file of `--spec`: one row per label or prompt, with a seed and a number of pictures. Imports no torch.

A .json file holds a list of objects, a .jsonl file one object per line, and a .csv file a header and one row per line.
The names are label or prompt, seed, num_images, image, strength, mask, control and ip_adapter_image. The run's values
replace those that a row leaves out. A picture is a file, relative to the folder of the spec.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from fastdiff.arguments import naming, shown
from fastdiff.checkpoints.json_files import parse_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_PICTURES, MAX_SEED, Fraction, Label, Pictures, Prompt, Seed
from fastdiff.requests.completion import (
    WHOLE,
    Cell,
    begin,
    complete,
    label_cells,
    mask_of,
    read_mask,
    read_picture,
    seeds_from,
    sized_as,
)
from fastdiff.requests.defaults import BULK, SEED
from fastdiff.requests.input_picture import (
    Control,
    ImagePrompt,
    InputPicture,
    Mask,
    check_control_count,
    check_image_count,
    read_control,
    read_image_prompt,
)
from fastdiff.requests.prompt_file import read_text
from fastdiff.requests.request import FileName, PictureNames, Request
from fastdiff.schema import Wanted, checked

NAMES = ("label", "prompt", "seed", "num_images", "image", "strength", "mask", "control", "ip_adapter_image")
_LISTS = ("control", "ip_adapter_image")  # of pictures
_KINDS: Mapping[str, Any] = {
    "label": Annotated[Label | str | None, Wanted("the name or index of a label")],
    "prompt": Prompt | None,
    "seed": Seed | None,
    "num_images": Pictures | None,
    "image": FileName | None,
    "strength": Fraction | None,
    "mask": FileName | None,
    "control": Annotated[FileName | PictureNames | None, Wanted("a path, or a list of one for each --control")],
    "ip_adapter_image": Annotated[
        FileName | PictureNames | None, Wanted("a path, or a list of one for each --ip-adapter")
    ],
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
    mask: str | None = None  # a path
    control: tuple[str, ...] | None = None  # a path for each ControlNet
    ip_adapter_image: tuple[str, ...] | None = None  # a path for each IP-Adapter, or several for a single one


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
    return [_beside(row, Path(path).parent) for row in rows]


def _beside(row: Row, folder: Path) -> Row:
    """Return the row with the paths of its files from where the command runs."""
    image, mask = (None if path is None else str(folder / path) for path in (row.image, row.mask))
    lists = {name: getattr(row, name) for name in _LISTS}
    paths: dict[str, Any] = {name: each and tuple(str(folder / path) for path in each) for name, each in lists.items()}
    return replace(row, image=image, mask=mask, **paths)


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
    alone: dict[str, Any] = {name: (value[name],) for name in _LISTS if isinstance(value.get(name), str)}
    return replace(row, **alone)


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
    inputs = _Inputs.read(rows, request, pixels=pixels)
    first = replace(request, label=labels[:1], prompt=prompts[:MAX_PICTURES], seed=SEED, num_images=1)
    completed = _complete_inputs(first, inputs, rows, card) if inputs.of_rows else complete(first, card, BULK)[0]
    for what, has, given in (("label", completed.label, labels), ("prompt", completed.prompt, prompts)):
        if has and not given:
            raise InputError(f"spec: {card.name} draws from {what}s, and no row has one; give each row a {what}")
    cells: list[Cell] = []
    for number, row in enumerate(rows, 1):
        picture, mask = inputs.of(row)
        strength = request.strength if row.strength is None and picture else row.strength
        with naming(f"spec: row {number}"):
            steps = completed.num_inference_steps or 0
            start = begin(picture, strength, steps, card, mask, controlled=bool(request.control))
            if mask is not None and completed.upscale is not None:
                raise InputError(WHOLE)
        cell = Cell(0, None, None, row.prompt, start, inputs.control_of(row), inputs.images_of(row))
        cells += _cells(row, request, card, BULK.most_pictures - len(cells), cell)
    return completed, cells


def _complete_inputs(request: Request, inputs: "_Inputs", rows: list[Row], card: ModelCard) -> Request:
    """Return a request completed, whose rows say what pictures start from."""
    inputs.check_reader(card)
    pairs = [inputs.of(row) for row in rows]
    request = _sized(request, pairs, [inputs.control_of(row) for row in rows], card)
    completed, *other = [complete(request, card, BULK, masked=each)[0] for each in {bool(mask) for _, mask in pairs}]
    if other and other[0].guidance_scale != completed.guidance_scale:
        raise InputError("spec: with a mask the model has another guidance scale than without; give --cfg-scale")
    return replace(completed, strength=request.strength if request.init_image else None)


Pair: TypeAlias = tuple[InputPicture | None, Mask | None]


@dataclass(frozen=True)
class _Inputs:
    """The pictures that the rows of a file name, each read once: by its path, and under None what the run gives."""

    pictures: Mapping[str | None, InputPicture | None]
    masks: Mapping[str | None, Mask | None]
    controls: Mapping[tuple[str, ...] | None, Control | None]
    prompts: Mapping[tuple[str, ...] | None, ImagePrompt | None]

    @classmethod
    def read(cls, rows: list[Row], request: Request, *, pixels: bool) -> "_Inputs":
        pictures: dict[str | None, InputPicture | None] = dict(_read(rows, "image", pixels))
        masks: dict[str | None, Mask | None] = {
            path: mask_of(each, request) for path, each in _read(rows, "mask", pixels)
        }
        own = None if masks and request.mask is None else read_mask(request)
        lists = _controls(rows, request, pixels), _image_prompts(rows, request, pixels)
        return cls({**pictures, None: read_picture(request)}, {**masks, None: own}, *lists)

    @property
    def of_rows(self) -> bool:
        """Whether a row has a picture of any kind."""
        lists = [paths for each in (self.controls, self.prompts) for paths in each]
        return len(self.pictures) > 1 or len(self.masks) > 1 or any(paths is not None for paths in lists)

    def check_reader(self, card: ModelCard) -> None:
        """Raise InputError, which names a file of a row, for a model that reads no text and so starts from nothing."""
        if card.reads_text:
            return
        files = [picture for path, picture in self.pictures.items() if picture and path is not None]
        files += [mask.picture for path, mask in self.masks.items() if mask and path is not None]
        lists = [*self.controls.items(), *self.prompts.items()]
        files += [each.pictures[0] for paths, each in lists if each and paths is not None]
        raise InputError(f"{files[0].setting}: {card.name} has no text encoder; leave it out")

    def of(self, row: Row) -> Pair:
        """Return the picture and the mask of a row. The run's mask is for rows with a picture."""
        picture = self.pictures[row.image]
        return picture, None if picture is None and row.mask is None else self.masks[row.mask]

    def control_of(self, row: Row) -> Control | None:
        """Return the control pictures of a row."""
        return self.controls[row.control]

    def images_of(self, row: Row) -> ImagePrompt | None:
        """Return the pictures of a row that IP-Adapters read."""
        return self.prompts[row.ip_adapter_image]


def _read(rows: list[Row], name: str, pixels: bool) -> Iterator[tuple[str, InputPicture]]:
    """Yield the path of each picture of a column, and the picture."""
    known: set[str] = set()
    for number, row in enumerate(rows, 1):
        path = getattr(row, name)
        if path is not None and path not in known:
            known.add(path)
            yield path, InputPicture.read(path, f"spec: row {number}: {name}", pixels=pixels)


def _controls(rows: list[Row], request: Request, pixels: bool) -> dict[tuple[str, ...] | None, Control | None]:
    """Return the control pictures by their paths, and under None the run's, which rows without any have."""
    found: dict[tuple[str, ...] | None, Control | None] = {}
    for setting, paths in _lists(rows, "control").items():
        if not request.control:
            raise InputError(f"{setting}: a ControlNet reads it; give --control, or leave it out")
        with naming(setting.removesuffix(": control")):
            check_control_count(len(paths), len(request.control))
        found[paths] = Control(tuple(InputPicture.read(path, setting, pixels=pixels) for path in paths))
    return {**found, None: read_control(request) if any(row.control is None for row in rows) else None}


def _image_prompts(rows: list[Row], request: Request, pixels: bool) -> dict[tuple[str, ...] | None, ImagePrompt | None]:
    """Return the pictures for IP-Adapters, as `_controls`."""
    found: dict[tuple[str, ...] | None, ImagePrompt | None] = {}
    for setting, paths in _lists(rows, "ip_adapter_image").items():
        if not request.ip_adapter:
            raise InputError(f"{setting}: an IP-Adapter reads it; give --ip-adapter, or leave it out")
        with naming(setting.removesuffix(": ip_adapter_image")):
            check_image_count(len(paths), len(request.ip_adapter))
        found[paths] = ImagePrompt(tuple(InputPicture.read(path, setting, pixels=pixels) for path in paths))
    return {**found, None: read_image_prompt(request) if any(row.ip_adapter_image is None for row in rows) else None}


def _lists(rows: list[Row], name: str) -> dict[str, tuple[str, ...]]:
    """Return the lists of a column without repetitions, by the place that messages name."""
    first: dict[tuple[str, ...], int] = {}
    for number, row in enumerate(rows, 1):
        if getattr(row, name) is not None:
            first.setdefault(getattr(row, name), number)
    return {f"spec: row {number}: {name}": paths for paths, number in first.items()}


def _sized(request: Request, inputs: list[Pair], controls: list[Control | None], card: ModelCard) -> Request:
    """Return the request with the size of the pictures without masks, or else of the control pictures.

    With Z-Image, those with masks count too.

    Raises InputError for pictures of several sizes, unless the request gives one.
    """
    _check_crops(inputs)
    given = [(picture, None if card.reads_captions else mask) for picture, mask in inputs if picture is not None]
    plain = [picture for picture, mask in given if mask is None]
    if not given:
        plain = [control.pictures[0] for control in controls if control is not None]
    if not plain:
        return request
    first = plain[0]
    other = next((each for each in plain if each.size != first.size), None)
    if other is not None and None in (request.height, request.width):
        sizes = ["{} x {}".format(*each.size) for each in (other, first)]
        raise InputError(
            f"{other.setting} {shown(other.name)} is {sizes[0]}, and the first picture is {sizes[1]}; give --height and"
            " --width, and all become this size"
        )
    sized = sized_as(first, request, card)
    some_are_masked = any(mask is not None for _, mask in given)
    if some_are_masked and None in (request.height, request.width) and card.size != (sized.width, sized.height):
        raise InputError(
            "spec: rows with a mask have the model's size, and rows without have their picture's; give --height and"
            " --width, and all become this size"
        )
    return sized


def _check_crops(inputs: list[Pair]) -> None:
    """Raise InputError if pictures would have several sizes, as their parts are put back into them."""
    crops = [mask.crop is not None for _, mask in inputs if mask is not None]
    if not any(crops):
        return
    sizes = {None if mask is None or picture is None else picture.size for picture, mask in inputs}
    if len(sizes) > 1:
        raise InputError(
            "mask-crop: it keeps the size of each row's picture; give pictures of one size, or leave it out"
        )


def _cells(row: Row, request: Request, card: ModelCard, most: int, cell: Cell) -> list[Cell]:
    """Return the pictures of a row, which are alike but for their seeds and labels."""
    assert isinstance(request.seed, int)
    first = request.seed if row.seed is None else row.seed
    count = row.num_images or request.num_images or 1
    seeds = seeds_from(first, count)
    if count > most:
        raise InputError(f"spec: more than {BULK.most_pictures} pictures; split it into several runs")
    if row.label is not None:
        return label_cells(card, card.info.label_choices(row.label, card.config.num_class_embeds), seeds)
    return [replace(cell, seed=seed) for seed in seeds]
