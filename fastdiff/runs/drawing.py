"""Draw a request, for the command and the page: first a checked `Run`, then its pictures step by step.

Every check that does not need torch runs before torch is imported.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import fastdiff
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import begin_hash, begin_sha256
from fastdiff.checkpoints.single_files.cards import FileOptions, find_card
from fastdiff.requests.completion import Cell, complete, enlarged
from fastdiff.requests.defaults import Defaults
from fastdiff.requests.file_option import FileOption, lora_names
from fastdiff.requests.input_picture import ImagePrompt, ImagesOfEach, InputPicture, Start
from fastdiff.requests.request import PROMPT_SETTINGS, UPSCALE_SETTINGS, Request
from fastdiff.requests.syntax import tags_in
from fastdiff.runs.option_files.controlnets import CONTROL_HASHES, weights_of_controlnets
from fastdiff.runs.option_files.embeddings import clip_tokenizers, tokenizers_of
from fastdiff.runs.option_files.ip_adapters import (
    ENCODER_HASH,
    IP_ADAPTER_HASHES,
    encoder_weights,
    ip_adapter_files,
)
from fastdiff.runs.option_files.kinds import KINDS
from fastdiff.text.weighted.checking import LONG, check_all

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    from PIL.Image import Image

    from fastdiff.diffusion.results import Step, Streams

_CONTROL_OPTIONS = {  # setting -> option of the library
    "control_scale": "controlnet_conditioning_scale",
    "control_start": "control_guidance_start",
    "control_end": "control_guidance_end",
}
Hashes: TypeAlias = "Future[str] | list[Future[str]]"  # of one file, or of several


@dataclass(frozen=True)
class Run:
    """A completed request that the model can draw, as far as can be checked without torch."""

    card: ModelCard
    request: Request  # completed
    cells: Sequence[Cell]  # labels or prompts x seeds, in that order
    batch_size: int

    @classmethod
    def prepare(cls, request: Request, card: ModelCard, defaults: Defaults, *, batch_size: int | None = None) -> "Run":
        """Complete and check a request. InputError for anything that the model cannot do."""
        completed, cells = complete(request, card, defaults)
        return cls(card, completed, cells, batch_size or defaults.batch_size or len(cells)).checked()

    def checked(self) -> "Run":
        """Return the run itself. Raises InputError for a weighted prompt that cannot be read."""
        request = self.request
        if request.prompt_syntax == "weighted":
            steps, loras = request.num_inference_steps or 1, lora_names([*map(FileOption.parse, request.lora)])
            prompts, negative = [cell.prompt or "" for cell in self.cells], request.negative_prompt or ""
            some_are_long = any(len(text) >= LONG for text in (*prompts, negative))
            tokenizers = (
                clip_tokenizers(tokenizers_of(request, self.card)) if some_are_long or request.embedding else []
            )
            check_all(prompts, "prompt", steps, loras, tokenizers)
            check_all([negative], "negative-prompt", steps, None, tokenizers)
        return self

    @property
    def names_loras(self) -> bool:
        """Whether a prompt names a LoRA, so that pictures have LoRAs with other weights."""
        return any(tags_in(cell.prompt, self.request.prompt_syntax) for cell in self.cells)

    @property
    def size(self) -> tuple[int, int] | None:
        """(width, height) of the pictures; None for trajectories."""
        height, width = self.request.height, self.request.width
        if height is None or width is None:
            return None
        start = self.cells[0].start
        if start is not None and start.mask is not None and start.mask.crop is not None:
            height, width = start.picture.size  # the drawn part is put back into it
        elif self.request.upscale is not None:
            height, width = enlarged((height, width), self.request.upscale, self.card.size_factor)
        return width, height


@dataclass(frozen=True)
class Finished:
    """A finished picture and the settings for its PNG."""

    place: int  # index of its cell in the run
    cell: Cell
    image: "Image"  # for a trajectory, its plot
    record: dict[str, Any]  # JSON values
    trajectory: "np.ndarray | None" = None  # (C, L) float32


@dataclass(frozen=True)
class Progress:
    """The state of a run after each step."""

    run: Run
    places: range  # of the batch's cells
    step: "Step"
    seconds: float  # since the first step began
    finished: Sequence[Finished]  # pictures finished by this step
    waited: float = 0.0  # how many of these seconds the run waited for other runs

    @property
    def ended(self) -> bool:
        """Whether this was the last step of the batch."""
        return self.step.index + 1 == self.step.num_steps

    @property
    def done(self) -> float:
        """The number of pictures drawn. A picture in progress counts by its share of steps."""
        return self.places.start + len(self.places) * (self.step.index + 1) / self.step.num_steps

    @property
    def fraction(self) -> float:
        """The finished fraction of the run, 0 to 1."""
        return self.done / len(self.run.cells)

    @property
    def rate(self) -> float:
        """Pictures per second."""
        return self.done / max(self.seconds, 1e-9)


def find_model(request: Request) -> ModelCard:
    """Return the model of `request`, and download it if it is on the hub. InputError if it does not exist."""
    options = FileOptions(request.config, request.vae, request.prediction_type)
    return find_card(request.model, options, revision=request.revision, variant=request.variant)


class Records:
    """The settings that the PNG of each picture of a run stores, as JSON values."""

    def __init__(self, run: Run, pipe: "Streams") -> None:
        self._shared = _shared_record(pipe, run.request)
        self._hashes = begin_hashes(run)

    def wait(self) -> None:
        """Wait for the hashes. Raises OSError for a file that cannot be read any more."""
        for digits in self._hashes.values():
            _results_of(digits)

    def of(self, cell: Cell, image: "Image") -> dict[str, Any]:
        """Return the settings of a finished picture. With a prompt, this waits for the hashes."""
        own: dict[str, Any] = {
            "seed": cell.seed,
            "label": cell.label_name,
            "width": image.width,
            "height": image.height,
        }
        for each in cell.given:
            own |= each.as_record()
        if cell.prompt is not None:
            own |= {"prompt": cell.prompt} | {name: _results_of(digits) for name, digits in self._hashes.items()}
        return self._shared | own


def _results_of(digits: Hashes) -> str | list[str]:
    return [each.result() for each in digits] if isinstance(digits, list) else digits.result()


def begin_hashes(run: Run) -> dict[str, Hashes]:
    """Begin to compute the hashes that the records of pictures with prompts hold. `Records` finds them begun."""
    if not run.card.reads_text:
        return {}
    vae = {} if run.request.vae is None else {"vae_hash": begin_sha256([Path(run.request.vae)])}
    files = {kind.hashes: kind.files(run.request) for kind in KINDS}
    own: dict[str, Hashes] = {name: [begin_sha256([path]) for path in paths] for name, paths in files.items() if paths}
    if run.request.control:
        own[CONTROL_HASHES] = [begin_sha256(paths) for paths in weights_of_controlnets(run.request)]
    if run.request.ip_adapter:
        own[IP_ADAPTER_HASHES] = [begin_sha256([path]) for path in ip_adapter_files(run.request)]
        own[ENCODER_HASH] = begin_sha256(encoder_weights(run.request))
    return {"model_hash": begin_hash(run.card, run.request.variant), **vae, **own}


def draw(run: Run, pipe: "Streams", records: Records | None = None, *, wait: bool = True) -> Iterator[Progress]:
    """Draw the run batch by batch and yield after each step. The last step of a batch has its pictures.

    After running out of memory, later batches keep the size that fitted. Runs of the same request can share `records`,
    which are expensive to make. Without `wait`, the GPU may still be computing a batch's pictures when the next batch
    begins; `wait_for_pictures` waits for them. Raises the errors of `Pipeline.stream`.
    """
    from fastdiff.diffusion.shared_steps import waited

    records, start, before = records or Records(run, pipe), time.perf_counter(), waited.get()
    first, size = 0, run.batch_size
    while first < len(run.cells):
        batch = _alike(run, first, size)
        options = _batch_options(run.request, batch)
        for step in pipe.stream(num_inference_steps=run.request.num_inference_steps, wait=wait, **options):
            seconds, places = time.perf_counter() - start, range(first, first + len(batch))
            progress = Progress(run, places, step, seconds, (), waited.get() - before)
            yield replace(progress, finished=wait_for_pictures(progress, records)) if wait else progress
        first, size = first + len(batch), size if step.at_once == len(batch) else step.at_once


def _alike(run: Run, first: int, size: int) -> Sequence[Cell]:
    """Return the cells from `first` on, at most `size`, that one call can draw.

    They all start from pictures of one kind, or all from noise alone. Their prompts name the same LoRAs, and they have
    equally many pictures for IP-Adapters.
    """
    cells, syntax = run.cells[first : first + size], run.request.prompt_syntax
    kinds = [
        (
            cell.start and cell.start.alike,
            tags_in(cell.prompt, syntax),
            cell.image_prompt and len(cell.image_prompt.pictures),
        )
        for cell in cells
    ]
    count = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), len(cells))
    return cells[:count]


def wait_for_pictures(progress: Progress, records: Records) -> list[Finished]:
    """Wait for and return the pictures that a step finished, if any. Raises NonFiniteError or DeviceLostError."""
    places = progress.places
    cells = progress.run.cells[places.start : places.stop]
    return [
        Finished(place, cell, image, records.of(cell, image), trajectory)
        for place, cell, (image, trajectory) in zip(places, cells, _results(progress.step), strict=False)
    ]


def _results(step: "Step") -> list[tuple["Image", "np.ndarray | None"]]:
    """Return the pictures of a last step, each with None, or the plot of each trajectory with the trajectory."""
    if step.trajectories is None:
        return [(image, None) for image in step.images or ()]
    from fastdiff.runs.plot import draw_lines

    return [(draw_lines(trajectory), trajectory) for trajectory in step.trajectories.trajectories]


def first_batch(run: Run) -> dict[str, Any]:
    """Return the `stream` options for the run's first batch, which `--explain` reports."""
    return _batch_options(run.request, _alike(run, 0, run.batch_size))


def _batch_options(request: Request, batch: Sequence[Cell]) -> dict[str, Any]:
    """Return the `Pipeline.stream` options for these pictures of a completed request, except the number of steps."""
    options: dict[str, Any] = {"batch_size": len(batch), "seed": [cell.seed for cell in batch]}
    names = ["guidance_scale", "eta", "height", "width", "horizon"]
    if request.prompt:
        options["prompt"] = [cell.prompt for cell in batch]
        names += (*PROMPT_SETTINGS, *UPSCALE_SETTINGS)
    else:
        names.append("use_clipped_model_output")
    if request.label:
        options["class_labels"] = [cell.label for cell in batch]
    starts = [cell.start for cell in batch if cell.start is not None]
    if starts:
        options |= _inputs(starts)
    controls = [cell.control.pictures for cell in batch if cell.control is not None]
    if controls:
        options |= _control(request, controls)
    images = [cell.image_prompt for cell in batch if cell.image_prompt is not None]
    if images:
        options["ip_adapter_image"] = _image_prompts(images, len(request.ip_adapter))
    settings = {name: getattr(request, name) for name in names}
    return options | {name: value for name, value in settings.items() if value is not None}


def _inputs(starts: Sequence[Start]) -> dict[str, Any]:
    """Return the options for pictures that start alike."""
    options = {"image": _opened([start.picture for start in starts]), "strength": starts[0].strength}
    masks = [start.mask for start in starts if start.mask is not None]
    if not masks:
        return options
    mask = {"mask_image": _opened([each.picture for each in masks]), "mask_blur": masks[0].blur}
    return options | mask | ({} if masks[0].crop is None else {"padding_mask_crop": masks[0].crop})


def _control(request: Request, controls: Sequence[tuple[InputPicture, ...]]) -> dict[str, Any]:
    """Return the options for ControlNets. `controls`: the pictures for all ControlNets, of each drawn picture."""
    if len(request.control) == 1:
        given: Any = _opened([picture for (picture,) in controls])
    elif all(each == controls[0] for each in controls):
        given = [picture.open() for picture in controls[0]]
    else:
        given = [[picture.open() for picture in each] for each in controls]
    return {"control_image": given, "guess_mode": bool(request.guess_mode)} | {
        name: getattr(request, setting) for setting, name in _CONTROL_OPTIONS.items() if getattr(request, setting)
    }


def _image_prompts(images: Sequence[ImagePrompt], adapters: int) -> list[Any] | ImagesOfEach:
    """Return the image prompts of drawn pictures: one for all if they are equal, or one for each."""
    made = {each: [picture.open() for picture in each.pictures] for each in dict.fromkeys(images)}
    given = {each: [opened] if adapters == 1 else opened for each, opened in made.items()}
    return given[images[0]] if len(given) == 1 else ImagesOfEach(given[each] for each in images)


def _opened(pictures: Sequence[InputPicture]) -> "Image | list[Image]":
    """Return a list of the pictures, or the picture if all are one."""
    alone = all(each == pictures[0] for each in pictures)
    return pictures[0].open() if alone else [each.open() for each in pictures]


def _shared_record(pipe: "Streams", request: Request) -> dict[str, Any]:
    """Return the settings that all pictures of a run share, as JSON values."""
    from fastdiff.execution.devices import device_name, dtype_name
    from fastdiff.kernels.plans import confirmation

    verdict = confirmation.in_force(pipe.device)
    versions = _versions() | ({} if verdict is None else {"fast kernels": verdict.digest})
    return request.as_record() | {
        "scheduler": pipe.scheduler_name,
        "dtype": dtype_name(pipe.dtype),
        "device": device_name(pipe.device),
        "versions": versions,
    }


@cache
def _versions() -> dict[str, str]:
    """Return the versions of fastdiff, torch and Triton, if it is installed."""
    from importlib import metadata  # slow to import

    import torch

    versions = {"fastdiff": fastdiff.__version__, "torch": str(torch.__version__)}
    try:
        return versions | {"triton": metadata.version("triton")}
    except metadata.PackageNotFoundError:
        return versions
