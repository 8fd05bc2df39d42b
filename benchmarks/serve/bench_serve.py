"""`fastdiff serve` under load: pictures per second and waiting times, with shared steps and with one request at a time.

    python benchmarks/serve/bench_serve.py [MODEL ...] [--server SERVER ...] [--seconds S] [--loads L ...]
        [--folder DIR] [--save [DIR]]

A MODEL is emoji-sd, or sd15 or sdxl with random weights, or the folder of a pipeline. The server is a process of its
own, and the clients are on the same machine. Each row is one SERVER:

    shared             `fastdiff serve`, whose requests share steps
    worker             `fastdiff serve --workers 1`, whose own process only speaks HTTP
    alone              `fastdiff serve --max-batch 1`, which draws one picture at a time
    diffusers          the same HTTP with diffusers' pipeline under torch.compile, one picture at a time
    diffusers-eager    the same without torch.compile; only if `--server` names it

    pipeline_s     pictures per second of the pipeline in a program of its own, without PNG, at its best batch
    capacity_s     pictures per second of `clients` clients, each of which asks again when its picture has arrived
    share          capacity_s / pipeline_s
    one_ms         a request to an idle server, from the call to the PNG: the median
    pipeline_ms    one picture of the pipeline, and its PNG: the median
    partial_ms     a request to an idle server for a partial picture after two steps: the median until it arrives
    p50_50 ...     percentiles of the milliseconds of a request, where requests arrive at random (Poisson) at 50, 80 and
                   95 % of `capacity_s`; `drawn_50` ... are the pictures per second then

The lines on stderr say when each part ended, and its result. A row is saved when its server has ended. `--folder` keeps
the random weights for the next run.
"""

import argparse
import itertools
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.reports import PARSER, report
from benchmarks.serve import pipeline_alone
from benchmarks.serve.clock import Clock
from benchmarks.serve.load import Answer, Body, Workload, closed_loop, one_by_one, poisson, rate_of, steady_loop
from benchmarks.serve.servers import SERVERS, SHARING, serving
from fastdiff.checkpoints import hub

WORKLOADS = {
    "emoji-sd": Workload(batches=(1, 4, 16, 32, 64)),
    "sd15": Workload(),
    "sdxl": Workload(batches=(1, 4, 16), clients=32, rounds=5),
}
LOADS = (50, 80, 95)  # percent
WARM_STEPS = 4  # of requests before the load
MOST_ASKED = 2000  # requests of a load
PATIENCE = 60.0  # seconds for the answers of a load


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    PARSER.add_argument("--seconds", type=float, default=10.0, help="how long a load lasts (default: 10)")
    PARSER.add_argument("--server", choices=SERVERS, action="append", help="measure these servers alone")
    PARSER.add_argument("--loads", type=int, nargs="*", default=LOADS, help="percent of capacity (default: 50 80 95)")
    PARSER.add_argument("--steps", type=int, help="of a picture (default: 20)")
    PARSER.add_argument("--clients", type=int, help="that ask again and again (default: 64, for sdxl 32)")
    PARSER.add_argument("--folder", type=Path, help="keep random weights in this folder, and use those that are there")
    options, clock = PARSER.parse_args(), Clock()
    names = options.workload or ["emoji-sd", "sd15", "sdxl"]
    report("serve", itertools.chain(*(rows(name, options, clock) for name in names)), by=("workload", "server"))


def rows(name: str, options: argparse.Namespace, clock: Clock) -> Iterator[dict[str, Any]]:
    """Yield the row of each server of a model."""
    workload = WORKLOADS.get(name, Workload())
    own = {key: value for key in ("steps", "clients") if (value := getattr(options, key)) is not None}
    workload = replace(workload, **own)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        is_random = name not in hub.bundled_models() and not Path(name).is_dir()
        folder = Path(options.folder or root, name) if is_random else None
        alone = pipeline_alone.measure_new
        pipeline = pipeline_alone.in_new_process(alone, workload, name, folder, clock)
        for server in options.server or [each for each in SERVERS if each != "diffusers-eager"]:
            with serving(name if folder is None else str(folder), server) as running:
                clock.say(f"{name} {server}: ready")
                row = {"workload": name, "server": server, "steps": workload.steps, "clients": workload.clients}
                for part in measure(server, running.address, workload, options, pipeline):
                    row |= part
                    figures = (f"{key} {value:.4g}" for key, value in part.items())
                    clock.say(f"{name} {server}: {', '.join(figures) or 'warm'}")
            yield row


def measure(
    server: str, address: str, workload: Workload, options: argparse.Namespace, pipeline: dict[str, float]
) -> Iterator[dict[str, float]]:
    """Yield the results of a server, part by part."""

    def body(number: int, **more: Any) -> Body:
        return workload.body(number, **more)

    shares = server in SHARING
    if shares and pipeline["pipeline_batch"] > 1:
        for count in workload.bursts:  # graphs of all sizes are captured
            closed_loop(
                address, lambda number: body(number, num_inference_steps=WARM_STEPS), count, lambda done: done > 0
            )
    yield dict(pipeline)
    bodies = [body(number) for number in range(2 + workload.rounds)]
    one = statistics.median(each.seconds for each in all_drawn(one_by_one(address, bodies))[2:])
    yield {"one_ms": 1e3 * one}
    bodies = [each | {"stream": True, "partial_images": 3} for each in bodies]
    parts = all_drawn(one_by_one(address, bodies))[2:]
    yield {"partial_ms": 1e3 * statistics.median(each.first - each.asked for each in parts)}
    # Shared steps are even once each client has begun at another time: one picture of each takes so long.
    ramp = workload.clients / pipeline["pipeline_s"] if shares else 2 * one
    begin, end, answers = steady_loop(address, body, workload.clients, ramp, options.seconds)
    capacity = rate_of(all_drawn(answers), begin, end)
    yield {"capacity_s": capacity, "share": capacity / pipeline["pipeline_s"]}
    for load in options.loads:
        yield under_load(address, workload, load, capacity * load / 100, options.seconds)


def under_load(address: str, workload: Workload, load: int, rate: float, seconds: float) -> dict[str, float]:
    """Return the waiting times and the rate, where requests arrive at `rate` per second. Empty without answers."""
    dice = random.Random(load)
    answers = all_drawn(poisson(address, workload.body, rate, seconds, dice, most=MOST_ASKED, patience=PATIENCE))
    if len(answers) < 2:
        return {}
    percentiles = statistics.quantiles((1e3 * each.seconds for each in answers), n=100, method="inclusive")
    whole = max(each.done for each in answers) - min(each.asked for each in answers)
    return {f"p{p}_{load}": percentiles[p - 1] for p in (50, 95, 99)} | {f"drawn_{load}": len(answers) / whole}


def all_drawn(answers: list[Answer]) -> list[Answer]:
    """Return the answers. Exit if one is an error."""
    if errors := [each for each in answers if each.status != 200]:
        raise SystemExit(f"{len(errors)} of {len(answers)} requests failed, the first with status {errors[0].status}")
    return answers


if __name__ == "__main__":
    main()
