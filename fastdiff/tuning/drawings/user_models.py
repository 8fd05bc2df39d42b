"""The drawings of a user's model that `fastdiff tune --model` tunes: each size and batch that the user names."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

from PIL import Image

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.pipelines import Pipeline, load_pipeline
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run, first_batch
from fastdiff.tuning import timing
from fastdiff.tuning.tuner import Call, Make

MOST_STEPS = 8  # enough that the denoiser's shapes come before the decoder's, as in a whole run; chosen, not measured


def of_model(
    request: Request, model: ModelCard, sizes: Iterable[Mapping[str, Any]], batches: Iterable[int]
) -> dict[str, Make]:
    """Return a function for each size and batch that returns a call which draws. All share one pipeline.

    Args:
        sizes: height and width each; empty for the model's own.

    Raises InputError for what the model cannot draw. Loading raises as `load_pipeline`.
    """
    if request.control and not model.reads_text:
        raise InputError(f"--control: {model.name} reads no text, and ControlNets need a text model; leave it out")

    @cache
    def load() -> Pipeline:
        pipe: Any = load_pipeline(model, request, str(timing.DEVICE))
        if model.reads_text:
            pipe.encoders.remember(0)  # each drawing runs the text encoders
        return pipe

    found: dict[str, Make] = {}
    for size, batch in product(sizes, batches):
        asked = replace(request, control=(), **size)
        if model.reads_text:
            asked = replace(asked, prompt=("",), num_images=batch)
        run = Run.prepare(asked, model, replace(COMMAND, labels=1, pictures=batch), batch_size=batch)
        name = f"{run.size[0]}x{run.size[1]}" if run.size else f"horizon {run.request.horizon}"
        found[f"{model.name}, {name}, batch {batch}"] = partial(_drawing, load, run, len(request.control))
    return found


def _drawing(load: Callable[[], Pipeline], run: Run, controlnets: int) -> Call:
    """Return a call that draws a batch in a few steps and returns the last one. ControlNets get black pictures."""
    pipe, options, steps = load(), first_batch(run), run.request.num_inference_steps or MOST_STEPS
    if controlnets and run.size:
        blank = [Image.new("RGB", run.size)] * controlnets
        options["control_image"] = blank if controlnets > 1 else blank[0]

    def draw() -> Any:
        *_, last = pipe.stream(num_inference_steps=min(MOST_STEPS, steps), **options)
        return last

    return draw
