"""From what the form or a call of the API asks for to finished PNG files."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdiff.errors import InputError
from fastdiff.pipeline import Step
from fastdiff.requests import png
from fastdiff.requests.request import DEFAULT_MODEL, MAX_SEED, ModelCard, Request, complete
from fastdiff.runs import files
from fastdiff.runs.drawing import Picture, shared_record, stream_batches
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models

MAX_NAME = 200  # characters


@dataclass(frozen=True)
class Options:
    """What is asked for, unchecked; None leaves a choice to the model. Each name is also the API's parameter."""

    model: Any = DEFAULT_MODEL
    label: Any = None
    seed: Any = 0
    num_images: Any = 1
    steps: Any = None
    scheduler: Any = None
    eta: Any = None
    guidance_scale: Any = None
    width: Any = None
    height: Any = None
    batch_size: Any = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Options":
        """Those of one picture, out of the settings that it records."""
        same = ("model", "label", "seed", "scheduler", "eta", "guidance_scale", "width", "height")
        return cls(steps=record["num_inference_steps"], **{name: record.get(name) for name in same})


@dataclass(frozen=True)
class Job:
    """Pictures that can be drawn, as far as that can be told without the model's weights."""

    card: ModelCard
    request: Request
    pictures: Sequence[Picture]
    batch_size: int
    size: dict[str, int]  # height and width, pixels


@dataclass(frozen=True)
class Drawn:
    """A finished picture: its PNG file, and the settings in it."""

    path: Path
    record: dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """Where a job is, after each step."""

    job: Job
    batch: range  # places of the pictures that are being drawn
    step: Step
    seconds: float  # since the first step began
    drawn: list[Drawn] = field(default_factory=list)  # pictures that this step finished

    @property
    def fraction(self) -> float:
        """Of the whole job, 0 to 1."""
        own_steps = len(self.batch) * (self.step.index + 1) / self.step.num_steps
        return (self.batch.start + own_steps) / len(self.job.pictures)

    @property
    def rate(self) -> float:
        """Pictures per second."""
        return self.fraction * len(self.job.pictures) / max(self.seconds, 1e-9)


def plan(options: Options, models: Models, limits: Limits) -> Job:
    """The job that `options` ask for. InputError naming the field and the remedy, before anything heavy is done."""
    _check_limits(options, limits)
    card = models.card(options.model)
    label = options.label
    if label is None and card.labels:
        label = next(iter(card.info.label_groups), card.labels[0])
    request = Request(
        model=card.name,
        label=() if label is None else (label,),
        seed=options.seed,
        num_images=options.num_images,
        num_inference_steps=models.default_steps(card) if options.steps is None else options.steps,
        scheduler=options.scheduler,
        eta=options.eta,
        guidance_scale=options.guidance_scale,
    )
    request, cells = complete(request, card)
    width, height = card.size or (None, None)
    size = {"height": options.height or height, "width": options.width or width}
    if None in size.values():
        raise InputError(f"width, height: {card.name} was trained at no size of its own; give both")
    card.config.check_size(**size, scale=card.scale)
    pictures = [_picture(card, label, seed) for seed, label in cells]
    return Job(card, request, pictures, options.batch_size or models.default_batch_size(), size)


def _check_limits(options: Options, limits: Limits) -> None:
    ranges = {
        "seed": (0, MAX_SEED),
        "num_images": (1, limits.pictures),
        "steps": (1, limits.steps),
        "width": (1, limits.side),
        "height": (1, limits.side),
        "batch_size": (1, limits.batch_size),
    }
    for name in ("model", "label"):
        value = getattr(options, name)
        if isinstance(value, str) and len(value) > MAX_NAME:
            raise InputError(f"{name} {value[:40]}...: give a name of up to {MAX_NAME} characters")
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        optional = Options.__dataclass_fields__[name].default is None
        if not (optional and value is None) and not (type(value) is int and least <= value <= most):
            raise InputError(f"{name} {str(value)[:40]}: give a whole number from {least} to {most}")


def _picture(card: ModelCard, label: int | None, seed: int) -> Picture:
    name = card.label_name(label)
    return Picture(seed, label, name, Path(f"{seed}.png" if name is None else f"{files.slug(name)}-{seed}.png"))


def draw(job: Job, models: Models, folder: Path) -> Iterator[Progress]:
    """Draw the pictures into `folder`, which must be there. Yields after each step, the pictures of a batch at its end.

    Raises InputError, NonFiniteError, OSError where the disk refuses, MemoryError.
    """
    pipe = models.pipeline(job.card, job.request.scheduler)
    record = shared_record(pipe, job.request)
    first, start = 0, time.perf_counter()
    for batch, step in stream_batches(pipe, job.request, job.pictures, job.batch_size, **job.size):
        places = range(first, first + len(batch))
        drawn = []
        if step.images:
            drawn = [_write(folder, record, *each) for each in zip(batch, step.images, strict=True)]
            first = places.stop
        yield Progress(job, places, step, time.perf_counter() - start, drawn)


def _write(folder: Path, record: dict[str, Any], picture: Picture, image) -> Drawn:
    own = {"seed": picture.seed, "label": picture.label_name, "width": image.width, "height": image.height}
    path = folder / picture.path
    files.write(path, png.encode(image, record | own), overwrite=False)
    return Drawn(path, record | own)
