"""`fastdiff serve` under load: pictures per second and waiting times, with shared steps and with one request at a time.

    python benchmarks/serve/bench_serve.py [MODEL ...] [--server {shared,alone}] [--seconds S] [--save [DIR]]

A MODEL is emoji-sd, or sd15 or sdxl with random weights. The server is a process of its own, and the clients are on the
same machine. Each row is one server:

    shared   `fastdiff serve`, whose requests share steps
    alone    `fastdiff serve --max-batch 1`, which draws one picture at a time

    pipeline_s     pictures per second of the pipeline in a program of its own, without PNG, at its best batch
    capacity_s     pictures per second of CLIENTS clients, each of which asks again when its picture has arrived
    share          capacity_s / pipeline_s
    one_ms         a request to an idle server, from the call to the PNG: the median
    pipeline_ms    one picture of the pipeline, and its PNG: the median
    partial_ms     a request to an idle server for a partial picture after the first step: the median until it arrives
    p50_50 ...     percentiles of the milliseconds of a request, where requests arrive at random (Poisson) at 50, 80 and
                   95 % of `capacity_s`; `drawn_50` ... are the pictures per second then
"""

import io
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

from benchmarks.harness.reports import PARSER, environment, report
from benchmarks.serve.load import Answer, Body, closed_loop, one_by_one, poisson
from fastdiff.checkpoints import hub

CLIENTS, LOADS, STEPS, ROUNDS = 64, (50, 80, 95), 20, 7
BATCHES = (1, 4, 16, 32)
PROMPTS = ("red apple", "fox face", "rocket", "house with garden", "smiling face")
SERVERS = {"shared": (), "alone": ("--max-batch", "1")}


def main() -> None:
    PARSER.add_argument("--seconds", type=float, default=10.0, help="how long a load lasts (default: 10)")
    PARSER.add_argument("--server", choices=SERVERS, help="measure this server alone")
    options = PARSER.parse_args()
    names = options.workload or ["emoji-sd", "sd15", "sdxl"]
    servers = [options.server] if options.server else [*SERVERS]
    each = (rows(name, servers, options.seconds) for name in names)
    report("serve", itertools.chain(*each), by=("workload", "server"))


def rows(name: str, servers: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the row of each server of a model."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        model = name if name in hub.bundled_models() else str(saved(name, Path(root, name)))
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:  # gives the GPU's memory back
            pipeline = alone.submit(measure_pipeline, model).result()
        for server in servers:
            with serving(model, *SERVERS[server]) as running:
                yield {"workload": name, "server": server, **measure(running.address, seconds, pipeline)}


def saved(name: str, folder: Path) -> Path:
    """Save a pipeline with random weights, and return its folder."""
    from benchmarks.pictures.text_folders import save_folder  # imports diffusers

    save_folder(name, folder, lambda pipe, latents: latents)  # the reference picture is not needed
    torch.cuda.empty_cache()
    return folder


def measure_pipeline(model: str) -> dict[str, float]:
    """Return the pipeline's best pictures per second, that batch, and the milliseconds of a picture and its PNG."""
    import fastdiff

    pipe = fastdiff.Pipeline.from_pretrained(model)
    rates = {}
    for count in BATCHES if pipe.device.type == "cuda" else (1,):
        times = [seconds_of(pipe, count, seed) for seed in range(2 + (3 if count > 1 else ROUNDS))]
        rates[count] = count / statistics.median(times[2:])
    best = max(rates, key=rates.__getitem__)
    one = [seconds_of(pipe, 1, seed, png=True) for seed in range(ROUNDS)]
    return {"pipeline_s": rates[best], "pipeline_batch": best, "pipeline_ms": 1e3 * statistics.median(one)}


def seconds_of(pipe: Any, count: int, seed: int, *, png: bool = False) -> float:
    """Return the seconds of a batch, from prompts to PIL images, or to PNGs."""
    start = time.perf_counter()
    prompts = [PROMPTS[(seed + i) % len(PROMPTS)] for i in range(count)]
    images = pipe(prompts, num_inference_steps=STEPS, seed=seed).images
    for image in images if png else ():
        image.save(io.BytesIO(), "PNG")
    return time.perf_counter() - start


class Server(NamedTuple):
    """A running server."""

    address: str
    process: int


@contextmanager
def serving(model: str, *flags: str) -> Iterator[Server]:
    """Run `fastdiff serve` as a process inside the block."""
    command = [sys.executable, "-m", "fastdiff", "serve", "--model", model, "--port", "0", *flags]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "http://" in line)
            address = next(word for word in line.split() if word.startswith("http://")).removesuffix("/v1")
            while httpx.get(f"{address}/ready", trust_env=False).status_code != 200:
                time.sleep(0.1)
            yield Server(address, server.pid)
        finally:
            server.terminate()


def body(number: int, **more: Any) -> Body:
    return {"prompt": PROMPTS[number % len(PROMPTS)], "seed": number, "num_inference_steps": STEPS, **more}


def measure(address: str, seconds: float, pipeline: dict[str, float]) -> dict[str, float]:
    """Return the times of a server."""
    closed_loop(address, body, CLIENTS, lambda count: count >= 2 * CLIENTS)  # graphs are captured, texts are encoded
    one = one_by_one(address, [body(number) for number in range(2 + ROUNDS)])[2:]
    parts = one_by_one(address, [body(number, stream=True, partial_images=3) for number in range(2 + ROUNDS)])[2:]
    end = time.perf_counter() + seconds
    drawn = all_drawn(closed_loop(address, body, CLIENTS, lambda _: time.perf_counter() > end))
    capacity = sum(each.done <= end for each in drawn) / seconds
    row = pipeline | {
        "capacity_s": capacity,
        "share": capacity / pipeline["pipeline_s"],
        "one_ms": 1e3 * statistics.median(each.seconds for each in one),
        "partial_ms": 1e3 * statistics.median(each.first - each.asked for each in parts),
    }
    for load in LOADS:
        answers = all_drawn(poisson(address, body, capacity * load / 100, seconds, random.Random(load)))
        percentiles = statistics.quantiles((1e3 * each.seconds for each in answers), n=100)
        row |= {f"p{p}_{load}": percentiles[p - 1] for p in (50, 95, 99)}
        row[f"drawn_{load}"] = len(answers) / (max(each.done for each in answers) - min(each.asked for each in answers))
    return row


def all_drawn(answers: list[Answer]) -> list[Answer]:
    """Return the answers. Exit if one is an error."""
    if errors := [each for each in answers if each.status != 200]:
        raise SystemExit(f"{len(errors)} of {len(answers)} requests failed, the first with status {errors[0].status}")
    return answers


if __name__ == "__main__":
    main()
