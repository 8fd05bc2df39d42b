"""The pipeline without a server, in a process of its own, which gives the GPU's memory back when it ends."""

import gc
import io
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve.clock import Clock
from benchmarks.serve.load import PROMPTS, Workload

WARM_STEPS = 4  # of a picture that is not measured, but captures the CUDA graphs
ENOUGH = 2.0  # seconds of measuring a batch
LEAST, MOST = 2, 7  # calls of a batch


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function of this module."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure_new(workload: Workload, model: str, folder: Path | None, clock: Clock) -> dict[str, float]:
    """Save a pipeline with random weights into the folder, unless it is None or exists, and `measure` it."""
    if folder is not None and not (folder / "model_index.json").exists():
        save(model, folder)
        clock.say(f"{model}: saved in {folder}")
    return measure(workload, model if folder is None else str(folder), clock)


def save(name: str, folder: Path) -> None:
    """Save a pipeline with random weights. The file that makes the folder a model comes last."""
    from benchmarks.pictures.text_folders import random_pipeline  # imports diffusers

    pipe = random_pipeline(name, folder / "bytes").to(torch.bfloat16)
    pipe.save_pretrained(folder)  # the model_index.json comes last
    del pipe
    gc.collect()
    torch.cuda.empty_cache()


def measure(workload: Workload, model: str, clock: Clock) -> dict[str, float]:
    """Return the pipeline's best pictures per second, that batch, and the milliseconds of a picture and its PNG."""
    import fastdiff

    pipe = fastdiff.Pipeline.from_pretrained(model)
    clock.say("pipeline: loaded")
    rates = {}
    for count in workload.batches if pipe.device.type == "cuda" else (1,):
        for seed in range(2):
            _seconds_of(pipe, count, WARM_STEPS, seed)
        rates[count] = count / _median(partial(_seconds_of, pipe, count, workload.steps))
        clock.say(f"pipeline: {rates[count]:.4g} pictures/s in batches of {count}")
    best = max(rates, key=rates.__getitem__)
    one = _median(partial(_seconds_of, pipe, 1, workload.steps, png=True))
    clock.say(f"pipeline: {1e3 * one:.4g} ms for a picture and its PNG")
    return {"pipeline_s": rates[best], "pipeline_batch": best, "pipeline_ms": 1e3 * one}


def _median(seconds_of: Callable[[int], float]) -> float:
    """Return the median of a few calls, each with a seed of its own."""
    times: list[float] = []
    while len(times) < LEAST or (len(times) < MOST and sum(times) < ENOUGH):
        times.append(seconds_of(len(times)))
    return statistics.median(times)


def _seconds_of(pipe: Any, count: int, steps: int, seed: int, *, png: bool = False) -> float:
    """Return the seconds of a batch, from prompts to PIL images, or to PNGs."""
    start = time.perf_counter()
    prompts = [PROMPTS[(seed + i) % len(PROMPTS)] for i in range(count)]
    images = pipe(prompts, num_inference_steps=steps, seed=seed).images
    for image in images if png else ():
        image.save(io.BytesIO(), "PNG")
    return time.perf_counter() - start
