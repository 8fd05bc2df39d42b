"""Profile a forward: the kernels of one CUDA graph replay, summed by class, in us.

    python benchmarks/models/profile_models.py [WORKLOAD ...] [--save [DIR]]

`replay_us` is a replay's time without the profiler, and `profiled_us` is the time from the start of its first kernel to
the end of its last under the profiler. The classes are convolutions (including a norm in their epilogue), norms,
attention, products (linear layers, also in the time and class embedding) and others (embeddings, activations
and copies). A class counts a kernel from start to end. A kernel may start before its producer has ended and wait for
it, so kernels can overlap:

    profiled_us = the classes + gaps_us (no kernel runs) - overlap_us (counted in two kernels)

`<class>_launches` counts the kernels. The row is the profile with the median `profiled_us` of PROFILES profiles.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.operations import kernel_modules
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.models.forwards import MODELS_GPU
from fastdiff.tuning.forwards import dtype_of, in_dtype, inputs, random_model
from fastdiff.tuning.timing import capture, measure

PROFILES = 5
CLASSES = ("convolutions", "norms", "attention", "products", "others")
OURS = {  # modules of device code
    "conv2d": "convolutions",
    "group_norm": "norms",
    "layer_norm": "norms",
    "attention": "attention",
    "attention_few_keys": "attention",
    "linear": "products",
}
LIBRARIES = {  # the first pattern in the name of a kernel of torch or its libraries decides
    r"flash|fmha|sdpa|attention": "attention",
    r"conv(?!ert)|fprop|dgrad|im2col": "convolutions",
    r"(group|layer|rms)_?norm|RowwiseMoments": "norms",
    r"gemm|gemv|nvjet|cublas|cutlass|splitk": "products",
}


class Kernel(NamedTuple):
    """A kernel or a copy that ran, with its start and end in us."""

    name: str
    start: float
    end: float


def main() -> None:
    names = chosen(MODELS_GPU)
    needs_gpu()
    report("profile_models", (row(name) for name in names))


@torch.inference_mode()
def row(name: str) -> dict[str, Any]:
    config, batch, _ = MODELS_GPU[name]
    model: Any = random_model(config, dtype_of(name))
    given = in_dtype(inputs(config, batch), dtype_of(name))
    model(*given)  # compiles the kernels in parallel
    model.use_graphs = False  # the graph captured below has no copies in and out, unlike the model's own
    model(*given)
    replay = capture(lambda: model(*given))
    milliseconds = measure({"replay": replay}, graph=False)["replay"]
    profiles = sorted((breakdown(profiled(replay)) for _ in range(PROFILES)), key=lambda each: each["profiled_us"])
    return {"workload": name, "replay_us": 1e3 * milliseconds, **profiles[PROFILES // 2]}


def profiled(replay: Callable[[], object]) -> list[Kernel]:
    """Return everything that runs on the GPU in a call."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in events]


def breakdown(kernels: list[Kernel]) -> dict[str, float]:
    """Return the time of each class, of gaps and of overlaps, and the numbers of launches."""
    sums, launches = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(CLASSES, 0)
    kernels = sorted(kernels, key=lambda kernel: kernel.start)
    gaps = overlap = 0.0
    first = end = kernels[0].start
    for kernel in kernels:
        kind = class_of(kernel.name)
        sums[kind] += kernel.end - kernel.start
        launches[kind] += 1
        gaps += max(0.0, kernel.start - end)
        overlap += max(0.0, min(end, kernel.end) - kernel.start)
        end = max(end, kernel.end)
    return {
        "profiled_us": end - first,
        **{f"{kind}_us": time for kind, time in sums.items()},
        "gaps_us": gaps,
        "overlap_us": overlap,
        **{f"{kind}_launches": count for kind, count in launches.items()},
    }


def class_of(name: str) -> str:
    """Return the class of one of our kernels, or of a library's."""
    module = kernel_modules().get(name)
    if module is not None:
        return OURS.get(module, "others")
    return next((kind for found, kind in LIBRARIES.items() if re.search(found, name, re.IGNORECASE)), "others")


if __name__ == "__main__":
    main()
