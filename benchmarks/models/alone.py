"""A model alone in its process: the seconds to its first result, and the memory of the GPU that it takes.

    python benchmarks/models/alone.py {fastdiff,eager,compile} WORKLOAD

Prints JSON, of which `bench_models.py` makes a part of its rows:

    first_result_s     from the start of building the model, its weights zeros, to its first output
    new_resolution_s   of ours: from there to the first output of a picture half as wide and high again
    weights_bytes      the parameters
    peak_bytes         the most that torch holds of the GPU's memory in calls after the first ones: weights, the memory
                       of CUDA graphs, and what a call needs. What only the first calls needed, to choose among cuDNN's
                       algorithms or before a capture, is given back before.
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

CALLS = 3  # the first compiles, the second captures, the third replays


def main() -> None:
    who, name = sys.argv[1:]
    torch.backends.cudnn.benchmark = True
    print(json.dumps(measure_alone(who, name)))


@torch.inference_mode()
def measure_alone(who: str, name: str) -> dict[str, float]:
    """The numbers of "fastdiff", or of diffusers by "eager" torch or "compile"."""
    config, batch, _ = WORKLOADS[name]
    dtype = dtype_of(name)
    given = in_dtype(inputs(config, batch), dtype)
    sample, *condition = given
    library = importlib.import_module("fastdiff" if who == "fastdiff" else "diffusers")
    kind = getattr(library, class_name(config))
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
    """A model of zeros on DEVICE, which was nowhere else before: no memory is left over from a copy."""
    with on_meta():  # as weights are loaded
        model = kind.from_config(config)
    model = model.to(dtype).to(memory_format=torch.channels_last).to_empty(device=DEVICE).eval()
    for parameter in model.parameters():
        parameter.zero_()
    return model


def compile_diffusers(theirs: Any) -> Any:
    """diffusers' model under torch.compile, with all that diffusers' manual does for speed."""
    torch.compiler.reset()
    if hasattr(theirs, "fuse_qkv_projections"):  # diffusers' DiT has no such method
        theirs.fuse_qkv_projections()
    return torch.compile(theirs, mode="reduce-overhead", fullgraph=True)


def seconds_to(call: Callable[[], object], start: float) -> float:
    """Seconds from `start` to the end of a call."""
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def held_bytes(call: Callable[[], object]) -> int:
    """The most that torch's allocator holds while `call` is repeated, after its first calls."""
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # keeps the memory of CUDA graphs
    torch.cuda.reset_peak_memory_stats()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


if __name__ == "__main__":
    main()
