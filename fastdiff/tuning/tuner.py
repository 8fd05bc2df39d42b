"""Tune forwards: find their shapes, judge the candidates of each, and keep the choices in the table."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

import fastdiff
from fastdiff.errors import InputError
from fastdiff.tuning import timing
from fastdiff.tuning.forwards import dtype_of, forward
from fastdiff.tuning.judging import tune
from fastdiff.tuning.models import WORKLOADS
from fastdiff.tuning.shapes import compile_candidates, shapes_of
from fastdiff.tuning.tables import keep

Make = Callable[[], Callable[[], Any]]  # makes a model, and returns a call of it


def find_card() -> str:
    """Return the name of the card that is tuned. InputError where there is none, or no Triton."""
    if find_spec("triton") is None:
        raise InputError("tune: Triton is not installed; pip install triton")
    if not torch.cuda.is_available():
        raise InputError("tune: no GPU was found; only kernels of a GPU have anything to tune")
    return torch.cuda.get_device_name(timing.DEVICE)


def of_workloads(names: list[str]) -> dict[str, Make]:
    """Return what makes the forward of each workload."""
    return {name: partial(forward, *WORKLOADS[name], dtype_of(name)) for name in names}


def of_model(folder: str, batch_size: int) -> dict[str, Make]:
    """Return what makes a drawing of a folder's pipeline. Calls of it raise InputError for what cannot be loaded."""
    return {folder: partial(_drawing, folder, batch_size)}


def _drawing(folder: str, batch_size: int) -> Callable[[], Any]:
    """Return a call that draws `batch_size` pictures in two steps."""
    pipe = fastdiff.Pipeline.from_pretrained(folder, device=timing.DEVICE)
    prompt = {"prompt": ""} if pipe.reads_text else {}
    return partial(pipe, num_inference_steps=2, batch_size=batch_size, **prompt)


def rows(forwards: Mapping[str, Make], card: str, wrong: list[str]) -> Iterator[dict[str, Any]]:
    """Tune all shapes of each forward, and yield a row for each once its choice is in the table.

    wrong: a line is added for each shape that cannot be proven, and for a forward that the card has no memory for.
    """
    torch.backends.cudnn.allow_tf32 = False  # candidates are held against float32 without it
    for workload, make in forwards.items():
        with torch.inference_mode():
            try:
                shapes = shapes_of(make())
            except torch.OutOfMemoryError as error:
                wrong.append(f"{workload}: {error}")
                continue
            compile_candidates(shapes)
            for shape in shapes:
                try:
                    row = tune(shape)
                except (ArithmeticError, torch.OutOfMemoryError) as error:
                    wrong.append(f"{shape.operation} {shape.name}: {error}")
                    continue
                keep(card, row)
                yield {"workload": workload} | row
