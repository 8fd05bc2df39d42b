"""Tune forwards: find their shapes, judge each shape's candidates, and keep the choices in the table."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

import fastdiff
from fastdiff.checkpoints.single_files.reading import is_single_file
from fastdiff.errors import InputError
from fastdiff.tuning import timing
from fastdiff.tuning.forwards import dtype_of, forward
from fastdiff.tuning.judging import tune
from fastdiff.tuning.models import WORKLOADS
from fastdiff.tuning.shapes import compile_candidates, shapes_of
from fastdiff.tuning.tables import keep

Make = Callable[[], Callable[[], Any]]  # builds a model, and returns a call of it


def find_card() -> str:
    """Return the name of the card to tune. Raises InputError without a GPU or without Triton."""
    if find_spec("triton") is None:
        raise InputError("tune: Triton is not installed; pip install triton")
    if not torch.cuda.is_available():
        raise InputError("tune: no GPU was found; only GPU kernels can be tuned")
    return torch.cuda.get_device_name(timing.DEVICE)


def of_workloads(names: list[str]) -> dict[str, Make]:
    """Return a function for each workload that builds its forward."""
    return {name: partial(forward, *WORKLOADS[name], dtype_of(name)) for name in names}


def of_model(model: str, batch_size: int) -> dict[str, Make]:
    """Return a function that loads a model's pipeline and returns a drawing call. It raises InputError if it fails."""
    return {model: partial(_drawing, model, batch_size)}


def _drawing(model: str, batch_size: int) -> Callable[[], Any]:
    """Return a call that draws `batch_size` pictures in two steps."""
    load = fastdiff.Pipeline.from_single_file if is_single_file(model) else fastdiff.Pipeline.from_pretrained
    pipe = load(model, device=timing.DEVICE)
    prompt = {"prompt": ""} if pipe.reads_text else {}
    return partial(pipe, num_inference_steps=2, batch_size=batch_size, **prompt)


def rows(forwards: Mapping[str, Make], card: str, wrong: list[str]) -> Iterator[dict[str, Any]]:
    """Tune all shapes of each forward, and yield a row for each shape after its choice is in the table.

    Args:
        wrong: receives a line for each shape that fails its checks, and for each forward that runs out of memory.
    """
    torch.backends.cudnn.allow_tf32 = False  # the check compares with exact float32
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
