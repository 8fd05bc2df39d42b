"""Compile what drawing launches, for a card that need not be there. No weights are read.

The model is built from its configs with ghosts as weights, and draws a few steps. Every kernel goes through the launch
that drawing uses, which compiles it into Triton's cache instead of launching it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastdiff.checkpoints import weights
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.quantisation import formats
from fastdiff.checkpoints.registry import ModelPart
from fastdiff.execution.devices import on_meta
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.models.classes import model_class, model_folders
from fastdiff.models.model import Model
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.folders import scheduler_of
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run, first_batch
from fastdiff.text.loading import load_tokenizer
from fastdiff.warming.card import Card, pretended
from fastdiff.warming.ghosts import GPU

Size = Mapping[str, Any]  # height and width, or horizon; empty for the model's own


@dataclass(frozen=True)
class Warmed:
    """A row of the result: the kernels of one size and one batch."""

    size: str  # WIDTHxHEIGHT, or the horizon of trajectories
    batch: int
    kernels: int  # compiled variants that no earlier row launches
    compiled: int  # of them, those that were not in Triton's cache
    seconds: float
    failed: tuple[str, ...] = ()  # why kernels did not compile


def warm(
    request: Request, model: ModelCard, card: Card, sizes: Sequence[Size], batches: Sequence[int]
) -> Iterator[Warmed]:
    """Compile what drawing `request` launches on `card`, and yield a row for each size and batch when it is ready.

    Raises InputError for what the model or the card cannot do.
    """
    with pretended(card):
        pipe = load(model, request)
        for size in sizes:
            for batch in batches:
                start, before = time.perf_counter(), compiled_files()
                with only_compiling() as compiler:
                    for run in runs(replace(request, **size), model, batch):
                        draw(pipe, run)
                compiled = len(compiled_files() - before)
                failed = tuple(str(error).strip().partition("\n")[0] for error in compiler.failures())
                seconds = time.perf_counter() - start
                yield Warmed(size_of(run), batch, len(compiler.jobs), compiled, seconds, failed)


def load(model: ModelCard, request: Request) -> Pipeline:
    """Return the pipeline of a folder with ghosts as weights. The folder needs no weight files."""
    options = Load.of(device=GPU, dtype=request.dtype, precision=request.precision, scheduler=request.scheduler)
    models = {part.name: _model(part, folder, options) for part, folder in model_folders(model).items()}
    tokenizers = {each.name: load_tokenizer(each, model.folder) for each in model.tokenizers}
    kind, scheduler = Pipeline.kinds[model.drawn_by], scheduler_of(model, options.scheduler)
    pipe: Any = kind._of_card(model, {**models, **tokenizers}, scheduler)
    for each in models.values():
        each.use_graphs = False
    return pipe


def _model(part: ModelPart, folder: Path, options: Load) -> Model:
    kind, path = model_class(part, Model), folder / "config.json"
    with on_meta():
        model = kind.from_config(part.config.from_mapping(read_json(path), path), source=str(path))
    shapes = weights.diffusers_shapes(model)
    state = {name: torch.empty(shape, dtype=options.dtype, device=GPU) for name, shape in shapes.items()}
    in_8_bits = formats(model, options.precision if part.in_8_bits else "full")
    weights.load_weights(model, state, source=str(folder), dtype=options.dtype, device=GPU, in_8_bits=in_8_bits)
    return model.eval()


def runs(request: Request, model: ModelCard, batch: int) -> Iterator[Run]:
    """Yield runs of one batch: of one label or prompt, and of as many as there are pictures."""
    for subjects in sorted({1, batch}):
        defaults = replace(COMMAND, labels=subjects, pictures=batch)
        prompts = tuple(map(str, range(subjects))) if model.reads_text else ()
        pictures = replace(request, prompt=prompts, num_images=batch // subjects if prompts else None)
        yield Run.prepare(pictures, model, defaults, batch_size=batch)


def draw(pipe: Pipeline, run: Run) -> None:
    """Draw a batch of ghosts."""
    for _ in pipe.stream(num_inference_steps=run.request.num_inference_steps, **first_batch(run)):
        pass


def size_of(run: Run) -> str:
    return str(run.request.horizon) if run.size is None else "x".join(map(str, run.size))


def compiled_files() -> set[Path]:
    """Return the compiled kernels in Triton's cache."""
    return set(Path(triton.knobs.cache.dir).glob("*/*.cubin"))
