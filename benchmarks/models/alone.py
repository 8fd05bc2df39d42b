"""Measure one model alone in a process: the seconds to its first result, and its GPU memory.

    python benchmarks/models/alone.py {fastdiff,eager,compile} WORKLOAD

Prints JSON for the rows of `bench_models.py`:

    first_result_s     from the start of building the model, with zero weights, to its first output
    new_resolution_s   fastdiff only: the first call at 1.5 times the width and height
    weights_bytes      the parameters
    peak_bytes         the peak of the GPU memory that torch reserves in warm calls: weights, CUDA graphs and
                       activations. Memory that only the first calls need, to choose among cuDNN's algorithms or before
                       a capture, is released beforehand.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models.forwards import WORKLOADS
from fastdiff.execution.devices import on_meta
from fastdiff.tuning.forwards import dtype_of, in_dtype, inputs
from fastdiff.tuning.models import class_name
from fastdiff.tuning.timing import DEVICE
from fastdiff.verification.peers import compile_diffusers, held_bytes


def main() -> None:
    who, name = sys.argv[1:]
    torch.backends.cudnn.benchmark = True
    print(json.dumps(measure_alone(who, name)))


@torch.inference_mode()
def measure_alone(who: str, name: str) -> dict[str, float]:
    """Return the results of "fastdiff", or of diffusers under "eager" torch or "compile"."""
    config, batch, _ = WORKLOADS[name]
    dtype = dtype_of(name)
    given = in_dtype(inputs(config, batch), dtype)
    sample, *condition = given
    library = importlib.import_module("fastdiff" if who == "fastdiff" else "diffusers")
    kind = getattr(library, class_name(config))
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # `to_empty` needs it, loading weights does not
    start = time.perf_counter()
    model = of_zeros(kind, config, dtype)
    run = compile_diffusers(model) if who == "compile" else model
    first = {"first_result_s": seconds_to(lambda: run(*given), start)}
    memory = {
        "weights_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "peak_bytes": held_bytes(lambda: run(*given)),
    }
    if who != "fastdiff":
        return first | memory
    side = 3 * sample.shape[-1] // 2
    sides = sample.ndim - 2
    larger = sample.repeat(1, 1, *(2,) * sides)[(..., *(slice(side),) * sides)]
    return first | memory | {"new_resolution_s": seconds_to(lambda: run(larger, *condition), time.perf_counter())}


def of_zeros(kind: Any, config: dict, dtype: torch.dtype) -> nn.Module:
    """Build a model of zeros directly on DEVICE, so that no memory remains from a copy."""
    with on_meta():  # as weights are loaded
        model = kind.from_config(config)
    model = model.to(dtype).to(memory_format=torch.channels_last).to_empty(device=DEVICE).eval()
    for parameter in model.parameters():
        parameter.zero_()
    return model


def seconds_to(call: Callable[[], object], start: float) -> float:
    """Return the seconds from `start` to the end of a call."""
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
