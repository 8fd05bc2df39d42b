"""`fastdiff sample`: from flags to PNG files. Everything that can be refused is refused before torch is imported."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.request import Cell, ModelCard, Request, complete
from fastdiff.runs import files

_BAR = "{percentage:3.0f}%|{bar}| {n:.1f}/{total:.0f} pictures [{elapsed}<{remaining}, {rate_noinv_fmt}]"


@dataclass(frozen=True)
class Picture:
    """One picture that is to be drawn."""

    seed: int
    label: int | None  # index
    label_name: str | int | None
    path: Path


@dataclass(frozen=True)
class Job:
    """A run that was checked as far as it can be without torch."""

    card: ModelCard
    request: Request
    pictures: Sequence[Picture]  # labels x seeds, in that order
    grid: Path | None
    columns: int  # of the grid


def run(args: argparse.Namespace) -> int:
    """Draw what `args` ask for and return the exit code. Raises what cli.main turns into exit codes."""
    start = time.perf_counter()
    if args.explain:
        return _explain(args)
    job = plan(args)
    written: list[Path] = []
    try:
        for path in _draw(job, args):
            written.append(path)
    except KeyboardInterrupt:
        _say(f"interrupted; wrote {_summary(job, written)}")
        return 130
    _say(f"wrote {_summary(job, written)} in {time.perf_counter() - start:.1f} s")
    return 0


def plan(args: argparse.Namespace) -> Job:
    """Settings, model folder and file names of a run. InputError for whatever cannot be drawn or written."""
    card, request, cells = _read_request(args)
    pattern = files.as_pattern(args.out, with_labels=bool(request.label))
    paths = files.plan(pattern, [(seed, card.label_name(label)) for seed, label in cells], args.overwrite)
    pictures = [
        Picture(seed, label, card.label_name(label), path) for (seed, label), path in zip(cells, paths, strict=True)
    ]
    columns = files.grid_columns(len(request.label), len(request.seed))
    grid = _plan_grid(args, card, pictures, columns) if args.grid else None
    return Job(card, request, pictures, grid, columns)


def _read_request(args: argparse.Namespace) -> tuple[ModelCard, Request, list[Cell]]:
    request = Request.from_flags(vars(args), args.source)
    card = ModelCard.read(request.model, hub.resolve(request.model, revision=request.revision, variant=request.variant))
    return card, *complete(request, card)


def _explain(args: argparse.Namespace) -> int:
    """Print what a step of the first batch of pictures runs on."""
    from fastdiff.reporting import report

    card, request, cells = _read_request(args)
    pipe = load_pipeline(card, request, args.device)
    cells = cells[: args.batch_size]
    with _naming_batch_size(pipe, len(cells)):
        found = report(pipe, **_stream_options(request, cells))
    print(json.dumps(found.as_dict()) if args.json else found)
    return 0


def _plan_grid(args: argparse.Namespace, card: ModelCard, pictures: Sequence[Picture], columns: int) -> Path:
    grid = pictures[0].path.parent / "grid.png" if args.grid is True else files.grid_path(args.grid)
    if any(files.file_key(picture.path) == files.file_key(grid) for picture in pictures):
        raise InputError(f"the grid and a picture would both be {grid}; name another file with --grid")
    files.check([grid], args.overwrite, "--grid")
    if card.size:
        files.sheet_size(len(pictures), columns, card.size)
    return grid


def _draw(job: Job, args: argparse.Namespace) -> Iterator[Path]:
    """Draw and write the pictures batch by batch, then the grid; yields each path once its file is whole."""
    from tqdm import tqdm

    pipe = load_pipeline(job.card, job.request, args.device)
    record = shared_record(pipe, job.request)
    sheet = files.ContactSheet(len(job.pictures), job.columns)
    steps = job.request.num_inference_steps
    total = len(job.pictures) * steps
    with tqdm(total=total, unit=" pictures", unit_scale=1 / steps, bar_format=_BAR, file=sys.stderr) as bar:
        for index, (picture, image) in enumerate(_finished(pipe, job, args.batch_size, bar)):
            own = {"seed": picture.seed, "label": picture.label_name, "width": image.width, "height": image.height}
            files.write(picture.path, png.encode(image, record | own), args.overwrite)
            yield picture.path
            if job.grid:
                sheet.paste(index, image)
            if args.json:
                line = {"path": str(picture.path), "seed": picture.seed, "label": picture.label_name}
                with bar.external_write_mode():
                    print(json.dumps(line | {"settings": record | own}), flush=True)
    if job.grid:
        own = {"seed": list(job.request.seed), "label": list(job.request.label) or None}
        size = {"width": sheet.image.width, "height": sheet.image.height}
        files.write(job.grid, png.encode(sheet.image, record | own | size), args.overwrite)
        yield job.grid


def load_pipeline(card: ModelCard, request: Request, device: str):
    """The pipeline of a completed request, with the scheduler it asks for. Raises as Pipeline.from_pretrained."""
    from fastdiff.diffusion.schedulers import scheduler_from_config
    from fastdiff.pipeline import Pipeline

    pipe = Pipeline.from_pretrained(card.folder, device=device, dtype=request.dtype, variant=request.variant)
    pipe.scheduler = scheduler_from_config(pipe.scheduler.config, request.scheduler)
    return pipe


def _finished(pipe, job: Job, batch_size: int, bar) -> Iterator[tuple[Picture, Any]]:
    """(picture, PIL image) in order."""
    for batch, step in stream_batches(pipe, job.request, job.pictures, batch_size):
        bar.update(len(batch))
        if step.images:
            yield from zip(batch, step.images, strict=True)


def stream_batches(
    pipe, request: Request, pictures: Sequence[Picture], batch_size: int, **size: int
) -> Iterator[tuple[Sequence[Picture], Any]]:
    """Draw the pictures of a completed request and yield (batch, pipeline.Step) after each step of each batch.

    `size` is the pipeline's `height` and `width`. MemoryError with a one-line message where the device or the host runs
    out.
    """
    for start in range(0, len(pictures), batch_size):
        batch = pictures[start : start + batch_size]
        options = _stream_options(request, [(picture.seed, picture.label) for picture in batch])
        with _naming_batch_size(pipe, len(batch)):
            for step in pipe.stream(num_inference_steps=request.num_inference_steps, **options, **size):
                yield batch, step


def _stream_options(request: Request, cells: Sequence[Cell]) -> dict[str, Any]:
    """The options of Pipeline.stream for these pictures of a completed request, but the number of steps."""
    return {
        "batch_size": len(cells),
        "seed": [seed for seed, _ in cells],
        "class_labels": [label for _, label in cells] if request.label else None,
        "guidance_scale": request.guidance_scale,
        "eta": request.eta,
        "use_clipped_model_output": request.use_clipped_model_output,
    }


@contextlib.contextmanager
def _naming_batch_size(pipe, batch_size: int) -> Iterator[None]:
    """Out of memory is a MemoryError whose one line says what to do."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
            raise
        raise MemoryError(f"{pipe.device}: out of memory; give a smaller --batch-size than {batch_size}") from None


def shared_record(pipe, request: Request) -> dict[str, Any]:
    """What all pictures of a run have in common, as JSON values."""
    import torch

    versions = {"fastdiff": fastdiff.__version__, "torch": str(torch.__version__)}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["triton"] = metadata.version("triton")
    return request.as_record() | {
        "scheduler": type(pipe.scheduler).__name__.removesuffix("Scheduler").lower(),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(pipe.device) if pipe.device.type == "cuda" else pipe.device.type,
        "versions": versions,
    }


def _summary(job: Job, written: Sequence[Path]) -> str:
    pictures = [path for path in written if path != job.grid]
    count = str(len(pictures)) if len(pictures) == len(job.pictures) else f"{len(pictures)} of {len(job.pictures)}"
    text = f"{count} picture{'' if len(job.pictures) == 1 else 's'}"
    if pictures:
        text += f" to {pictures[0] if len(pictures) == 1 else os.path.commonpath([p.parent for p in pictures]) or '.'}"
    return text + (f" and a grid to {job.grid}" if job.grid in written else "")


def _say(message: str) -> None:
    print(f"fastdiff: {message}", file=sys.stderr)
