"""Drawing for the page: check a request, draw it step by step, write PNG files, and keep them in the session."""

import functools
import io
import math
import zipfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr
from PIL import Image
from PIL.Image import Resampling

from fastdiff.arguments import shown
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.single_files.reading import has_model_suffix
from fastdiff.edges import HIGH, LOW, canny_picture
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.pil_images import as_rgb
from fastdiff.requests import defaults
from fastdiff.requests.completion import Cell
from fastdiff.requests.input_picture import CONTROL, Control, ImagePrompt, InputPicture
from fastdiff.requests.request import Request
from fastdiff.requests.syntax import tags_in, without_loras
from fastdiff.runs import drawing, files
from fastdiff.runs.drawing import Progress, Run
from fastdiff.runs.model_files import find_listed
from fastdiff.runs.names import cell_names
from fastdiff.runs.output import Output, columns_of
from fastdiff.runs.resuming import load_picture
from fastdiff.runs.sheet import MAX_SHEET_PIXELS, ContactSheet
from fastdiff.runs.writing import write_beside
from fastdiff.ui.history.search import Search
from fastdiff.ui.inputs.mask import mask_at
from fastdiff.ui.inputs.size import size_from
from fastdiff.ui.inputs.uploaded import keep, uploaded_path, without_folder
from fastdiff.ui.parts.request import CANNY, Limits, UncheckedRequest
from fastdiff.ui.serving.owners import shelf_of
from fastdiff.ui.serving.store import Shelf, Store
from fastdiff.ui.shared import Shared

Listed = TypeVar("Listed", Control, ImagePrompt)
MOST_PIXELS = MAX_SHEET_PIXELS // 4  # of all pictures of a grid; margins and an incomplete last row add to them
GONE = "a picture was deleted; select the pictures again"
# fields that are as in Request
_SAME = (
    *("strength", "prompt_syntax", "emphasis", "guidance_start", "guidance_stop"),
    *("mask_blur", "upscale", "upscale_strength", "upscale_mode"),
)
_OF_CONTROL = tuple(name for name in vars(UncheckedRequest()) if name.startswith(("control_", "canny_", "guess_")))
_OF_IP_ADAPTER = ("ip_adapter_image", "ip_adapter_scale")
EDGES = "edges.png"  # the name of control pictures that the page makes
INTERVAL = 0.1  # seconds between two reported steps: a GPU can compute a thousand steps a second


@dataclass(frozen=True)
class Drawn:
    """A finished picture: its PNG file and the settings embedded in it."""

    path: Path
    record: dict[str, Any]


class Session:
    """The pictures of one browser session, held in a gr.State. Gradio copies it for each session; a copy is empty."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.run: Run | None = None  # the last run of the Draw tab; None for a sheet
        self.drawn: list[Drawn] = []  # the pictures of the Draw tab, in order; a sheet comes before its pictures
        self.listed: list[Drawn] = []  # the pictures that the History tab shows
        self.page = 1  # the page of them; a refresh may be sent before the page's field knows it
        self.search = Search()  # of the History tab
        self.selected: list[Drawn] | None = None  # there, in the order of selection; None: one is chosen at a time
        self.deletion: tuple[str, float] | None = None  # the last one in History, and until when Undo is offered
        self.shown: tuple[str, int] | None = None  # the job whose pictures Draw shows, and how many
        self.sent: dict[Any, Any] = {}  # the last updates of components that show the queue

    def __deepcopy__(self, memo: dict) -> "Session":
        return Session(self.store)

    def shelf(self, request: gr.Request) -> Shelf:
        """Return the shelf of the user who sent `request`."""
        return shelf_of(self.store, request)

    def owner(self, request: gr.Request) -> str:
        """Return the name in the queue of the user who sent `request`."""
        return str(self.shelf(request).folder)


def prepare(unchecked: UncheckedRequest, shared: Shared, limits: Limits) -> Run:
    """Return the requested run. Raises InputError with the field and the remedy, before any heavy work."""
    unchecked = limits.check(unchecked)
    first = defaults.model_of(labelled=unchecked.label is not None)
    card = shared.catalogue.card(first if unchecked.model is None else unchecked.model)
    if card.reads_text and unchecked.prompt is None:
        raise InputError(f"prompt: {card.name} needs a prompt; it may be empty")
    tags = tags_in(unchecked.prompt, unchecked.prompt_syntax) if card.reads_text else ()
    start = None if unchecked.init_image is None else uploaded_path(unchecked.init_image, "init_image")
    mask = None if unchecked.mask is None else mask_at(unchecked.mask, limits.uploads)
    control = _upload_for("control", "a ControlNet", _OF_CONTROL, unchecked)
    images = _upload_for("ip_adapter", "an IP-Adapter", _OF_IP_ADAPTER, unchecked)
    height, width = _sides(unchecked, start or control, card, limits)
    control = control and control_picture(control, unchecked, (height, width), limits)
    request = Request(
        model=card.name,
        lora=shared.catalogue.option_files.chosen_loras(unchecked.lora or (), card, tags),
        embedding=shared.catalogue.embeddings_in(
            card,
            without_loras(unchecked.prompt or "", [tag.name for tag in tags]),
            unchecked.negative_prompt,
            is_whole=unchecked.prompt_syntax == "weighted",
        ),
        label=() if unchecked.label is None else (unchecked.label,),
        prompt=() if unchecked.prompt is None else (unchecked.prompt,),
        negative_prompt=unchecked.negative_prompt,
        clip_skip=unchecked.clip_skip,
        precision=unchecked.precision or defaults.PRECISION,
        seed=unchecked.seed,
        num_images=unchecked.num_images,
        num_inference_steps=unchecked.steps,
        scheduler=unchecked.scheduler,
        eta=unchecked.eta,
        guidance_scale=unchecked.guidance_scale,
        height=height,
        width=width,
        init_image=None if start is None else str(start),
        mask=None if mask is None else str(mask),
        **_control_fields(unchecked, control, card, shared.catalogue),
        **_image_prompt_fields(unchecked, images, card, shared.catalogue),
        **{name: getattr(unchecked, name) for name in _SAME},
    )
    with without_folder(start, mask, control, images):
        run = Run.prepare(request, card, shared.catalogue.defaults, batch_size=unchecked.batch_size)
    if run.size and request.upscale and max(run.size) > limits.enlarged:
        sides = "{} x {}".format(*run.size)
        raise InputError(
            f"upscale: the picture would be {sides}, and a side may have {limits.enlarged} pixels; lower it"
        )
    shared.budget.check(run)
    return run


def _sides(
    unchecked: UncheckedRequest, start: Path | None, card: ModelCard, limits: Limits
) -> tuple[int | None, int | None]:
    """Return the height and the width of a request, by default the sides of the picture `start` within the limits."""
    height, width = unchecked.height, unchecked.width
    if start is None or None not in (height, width):
        return height, width
    with without_folder(start):
        own = size_from(InputPicture.read(str(start), pixels=False).size, card, limits.side)
    return own[0] if height is None else height, own[1] if width is None else width


def _upload_for(name: str, what: str, settings: Sequence[str], unchecked: UncheckedRequest) -> Path | None:
    """Return the upload that a ControlNet or an IP-Adapter of a checked request reads, or None without one.

    name, what, settings: its field, its word with an article, and its other fields. Raises InputError if it has no
    picture, and for its settings without it.
    """
    image, (_, word) = f"{name}_image", what.split()
    if getattr(unchecked, name):
        if getattr(unchecked, image) is None:
            raise InputError(f"{image}: the {word} reads a picture; drop one, or choose no {word}")
        return uploaded_path(getattr(unchecked, image), image)
    values = {name: getattr(unchecked, name) for name in settings}
    given = next((name for name, value in values.items() if value is not None and value is not False), None)
    if given is not None:
        raise InputError(f"{given}: it is for {what}; choose one, or leave it out")
    return None


def control_picture(upload: Path, asked: UncheckedRequest, size: tuple[int | None, int | None], limits: Limits) -> Path:
    """Return the control picture that a checked request makes from an upload: the upload, or a file with its edges.

    size: (height, width) of the drawn picture, which the edges have too: thin edges would fade in a resize. Raises
    InputError for a file that is no picture, for thresholds in the wrong order, and as `keep`.
    """
    low, high = (
        LOW if asked.canny_low is None else asked.canny_low,
        HIGH if asked.canny_high is None else asked.canny_high,
    )
    if asked.control_preprocessor != CANNY:
        return upload
    if low > high:
        raise InputError(f"canny_low {low}: it is above the high threshold, {high}; give a smaller number")
    with without_folder(upload):
        data = _edges(InputPicture.read(str(upload), CONTROL, pixels=False), size, low, high)
    return keep(data, EDGES, limits.uploads)


@functools.lru_cache(maxsize=8)  # a sheet has many pictures of the same edges
def _edges(picture: InputPicture, size: tuple[int | None, int | None], low: int, high: int) -> bytes:
    image = as_rgb(picture.open(), f"{CONTROL} {shown(picture.name)}")
    height, width = size
    buffer = io.BytesIO()
    canny_picture(image.resize((width or image.width, height or image.height), Resampling.LANCZOS), low, high).save(
        buffer, "png"
    )
    return buffer.getvalue()


def _control_fields(
    unchecked: UncheckedRequest, picture: Path | None, card: ModelCard, catalogue: Catalogue
) -> dict[str, Any]:
    """Return the Request fields of a ControlNet that reads `picture`, or none without one."""
    if picture is None:
        return {}
    numbers = {name: getattr(unchecked, name) for name in ("control_scale", "control_start", "control_end")}
    return {
        **catalogue.controlnets.fields(unchecked.control, card),
        "control_image": (str(picture),),
        "guess_mode": unchecked.guess_mode,
        **{name: (float(value),) for name, value in numbers.items() if value is not None},
    }


def _image_prompt_fields(
    unchecked: UncheckedRequest, picture: Path | None, card: ModelCard, catalogue: Catalogue
) -> dict[str, Any]:
    """Return the Request fields of an IP-Adapter that reads `picture`, or none without one."""
    if picture is None:
        return {}
    scale = unchecked.ip_adapter_scale
    own = {} if scale is None else {"ip_adapter_scale": (float(scale),)}
    return {**catalogue.ip_adapters.fields(unchecked.ip_adapter, card), "ip_adapter_image": (str(picture),), **own}


def with_model_here(record: Mapping[str, Any], source: str, catalogue: Catalogue) -> tuple[dict[str, Any], str | None]:
    """Return the settings of the PNG `source` with the model's name here, and a line if its hash is another one.

    A single file has other paths elsewhere, and is found by its name and its hash. Raises InputError for a file that is
    not here.
    """
    files = files_of(catalogue.cards()) if has_model_suffix(record["model"]) else {}
    name, notice = find_listed(record, source, files)
    return {**record, "model": name}, notice


def with_files_here(record: Mapping[str, Any], source: str, catalogue: Catalogue) -> tuple[dict[str, Any], list[str]]:
    """Return the settings as `with_model_here`, with the files here that they name, and lines about others."""
    settings, line = with_model_here(record, source, catalogue)
    card = catalogue.card(settings["model"])
    settings, lines = catalogue.option_files.here(settings, source, card)
    for readers in (catalogue.controlnets, catalogue.ip_adapters):
        settings, more = readers.here(settings, source, card)
        lines += more
    return settings, [*filter(None, [line]), *lines]


def files_of(cards: Sequence[ModelCard]) -> dict[str, Path]:
    """Return the models that are single files, by their names."""
    return {card.name: card.file for card in cards if card.file}


def draw(
    run: Run, shared: Shared, folder: Path, start: str = ""
) -> Generator[tuple[Progress, list[Drawn]], None, None]:
    """Draw `run` into `folder`, beside the runs of other users; file names begin with `start`.

    Yields progress and the files completed so far: after each step that finishes pictures, and otherwise ten times a
    second.

    Raises InputError, NonFiniteError, OSError if the disk cannot be written, MemoryError, DeviceLostError.
    """
    shared.catalogue.option_files.check(run.request)
    shared.catalogue.ip_adapters.check(run.request)
    try:
        drawing.begin_hashes(run)  # beside the loading
    except InputError as error:
        raise InputError(shared.catalogue.without_paths(str(error))) from None
    pattern = files.default_pattern(run.request.subject)
    names = cell_names(run.cells, run.card.info)
    paths = [folder / f"{start}{path}" for path in files.picture_paths(pattern, run.cells, names)]
    with shared.models.using(run) as pipe, without_folder(*(Path(each.name) for each in inputs_of(run))):
        yield from shared.in_engine(run, pipe, lambda: _written(run, pipe, shared, Output(paths, embeds=True)))


def _written(
    run: Run, pipe: Pipeline, shared: Shared, output: Output
) -> Generator[tuple[Progress, list[Drawn]], None, None]:
    """Draw a run and write its pictures. Yields as `draw`."""
    steps = _with_names(shared.budget.watch(drawing.draw(run, pipe)), shared.catalogue)
    told = -INTERVAL
    for progress, drawn in write_beside(
        steps, lambda finished: Drawn(output.write(finished), finished.record), wait=pipe.device.type == "cpu"
    ):
        if drawn or progress.finished or progress.seconds >= told + INTERVAL:
            told = progress.seconds
            yield progress, drawn


def _with_names(steps: Iterator[Progress], catalogue: Catalogue) -> Iterator[Progress]:
    """Yield the steps. The settings of finished pictures name files without the folder."""
    for step in steps:
        finished = [replace(each, record=_named(catalogue.record_with_names(each.record))) for each in step.finished]
        yield replace(step, finished=finished)


def _named(record: Mapping[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {name: Path(record[name]).name for name in ("init_image", "mask") if name in record}
    for name in ("control_image", "ip_adapter_image"):
        named |= {name: [Path(each).name for each in record[name]]} if name in record else {}
    return {**record, **named}


def inputs_of(run: Run) -> list[InputPicture]:
    """Return the pictures that a run reads, as far as it has them: start picture, mask, control and image prompt."""
    return [picture for given in run.cells[0].given for picture in given.pictures]


def write_grid(run: Run, pictures: Sequence[Drawn]) -> Path:
    """Write a grid of the first pictures of `run` next to them, like `fastdiff sample --grid`.

    Raises InputError if a picture was deleted, OSError if the disk cannot be written.
    """
    if not all(drawn.path.exists() for drawn in pictures):
        raise InputError("a picture of this run was deleted; draw it again to save a grid")
    cells = [_started_inside(cell, drawn) for cell, drawn in zip(run.cells, pictures, strict=False)]
    run = replace(run, cells=cells)
    sheet = ContactSheet(len(pictures), columns_of(run))
    for place, drawn in enumerate(pictures):
        sheet.paste(place, load_picture(drawn.path, drawn.record))
    output, path = Output([], overwrite=True, embeds=True), pictures[0].path.parent / "grid.png"
    return output.write_grid(path, sheet.image, run, pictures[-1].record)  # type: ignore[arg-type]  # at least one


def _started_inside(cell: Cell, drawn: Drawn) -> Cell:
    """Return the cell of a picture whose own pictures are inside its PNG. The uploads may be gone."""
    inside, start = str(drawn.path), cell.start
    control, images = _listed_inside(cell.control, inside), _listed_inside(cell.image_prompt, inside)
    if start is not None:
        mask = start.mask and replace(start.mask, picture=replace(start.mask.picture, inside=inside))
        start = replace(start, picture=replace(start.picture, inside=inside), mask=mask)
    return replace(cell, start=start, control=control, image_prompt=images)


def _listed_inside(given: Listed | None, inside: str) -> Listed | None:
    """Return the pictures that a network reads, which are inside the PNG `inside`."""
    return given and replace(given, pictures=tuple(replace(each, inside=inside) for each in given.pictures))


def write_zip(folder: Path, root: Path, paths: Sequence[Path], most: int) -> Path:
    """Write pictures into FOLDER/pictures.zip, uncompressed, under their names relative to `root`.

    most: bytes. Raises InputError for more, or if a picture is gone.
    """
    target = folder / "pictures.zip"
    try:
        if sum(path.stat().st_size for path in paths) > most:
            raise InputError(f"these pictures have more than {most / 2**20:,.0f} MiB; select fewer")
        with zipfile.ZipFile(target, "w", strict_timestamps=False) as file:
            for path in paths:
                file.write(path, path.relative_to(root).as_posix())
    except FileNotFoundError:
        target.unlink(missing_ok=True)
        raise InputError(GONE) from None
    return target


def write_loose_grid(folder: Path, paths: Sequence[Path]) -> Path:
    """Write pictures of any runs into FOLDER/grid.png, row by row. A smaller one stands in the middle of its cell.

    Raises InputError if the grid would be too large, or if a picture is gone.
    """
    try:
        sizes = [_size(path) for path in paths]
        cell = max(width for width, _ in sizes), max(height for _, height in sizes)
        if len(paths) * cell[0] * cell[1] > MOST_PIXELS:
            raise InputError(f"a grid of {len(paths)} pictures of this size is too large; select fewer")
        sheet = ContactSheet(len(paths), math.ceil(math.sqrt(len(paths))))
        for place, path in enumerate(paths):
            with Image.open(path) as picture:
                framed = Image.new("RGB", cell, "white")
                left, top = ((most - own) // 2 for most, own in zip(cell, picture.size, strict=True))
                framed.paste(picture.convert("RGB"), (left, top))
            sheet.paste(place, framed)
    except FileNotFoundError:
        raise InputError(GONE) from None
    assert sheet.image is not None  # at least one picture
    sheet.image.save(folder / "grid.png")
    return folder / "grid.png"


def _size(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size
