"""Forwards, sm_90 plans and the time to the first result with the installed version of Triton.

    python benchmarks/bench_tritons.py [forwards] [plans] [first] [--save [DIR]]

Each time is measured twice, in alternation in one process: `hopper_ms` with the plans of `plans/choices.py`,
`without_ms` without them. `gain` is `without_ms / hopper_ms`. A forward is timed as it is called. A plan is timed by
graph replays of its operation, at the last of its sizes in `shapes.py`. `compile_s` is the time to compile all plans'
workloads, both ways. `first_result_s` is measured with one model alone in a new process with an empty Triton cache
(`models/alone.py`).

To measure another Triton, unpack its wheel into a folder, put the folder first on PYTHONPATH, and set TRITON_CACHE_DIR
to a folder of its own. `--save` replaces the rows of this Triton and keeps the rows of the others.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.bench_models import in_new_process
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.kernels import bench_attention, bench_conv2d, bench_geglu, bench_linear, bench_swiglu
from benchmarks.kernels.quantised import bench_conv2d_8bit, bench_linear_8bit
from benchmarks.models.forwards import ours
from benchmarks.shapes import ATTENTIONS, CONVOLUTIONS_8BIT, GEGLUS, HOPPER_CONVOLUTIONS, LINEARS, SWIGLUS
from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import conv2d
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import choices
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.kernels.swiglu import swiglu
from fastdiff.tuning.timing import Call, measure

FORWARDS = (
    "ddpm32_b1", "ddpm32_b64", "ddpm256_b1", "ddpm256_b8", "emoji64_b64", "dit_b2", "dit_b32", "sd15_b2", "sd15_b16",
    "sdxl_b2",
)  # fmt: skip
FIRST = ("ddpm32_b1", "sd15_b2")
Invocation = tuple[Operation, tuple, dict[str, Any]]  # an operation, its arguments and options


def main() -> None:
    needs_gpu()
    kinds: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "first": lambda: map(first_row, FIRST), "forwards": lambda: map(forward_row, FORWARDS), "plans": plan_rows
    }  # fmt: skip
    asked = chosen(kinds)
    report("tritons", (row for kind in asked for row in kinds[kind]()), by=("triton", "workload"))


def first_row(name: str) -> dict[str, Any]:
    return {"workload": f"first result of {name}", **_only(in_new_process("fastdiff", name), "first_result_s")}


def _only(values: dict[str, float], name: str) -> dict[str, float]:
    return {name: values[name]}


@torch.inference_mode()
def forward_row(name: str) -> dict[str, Any]:
    """Time our forward with and without the plans, each on a model that captures its own graphs."""
    return {"workload": name, **both_ways(lambda: ours(name), graph=False, seconds=0.1)}


@torch.inference_mode()
def plan_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each confirmed plan that some workload here takes."""
    found = plans()
    start = time.perf_counter()
    with only_compiling():
        for make in found.values():
            operation, args, options = make()
            for taken in (choices.CHOICES.plans, frozenset[str]()):
                with taking(taken):
                    operation(*args, **options)
    torch.cuda.synchronize()
    yield {"workload": "all plans", "compile_s": time.perf_counter() - start, "plans": len(found)}
    for plan, make in found.items():
        yield {"workload": plan, **both_ways(lambda make=make: call_of(*make()), graph=True, seconds=0.01)}


def both_ways(make: Callable[[], Call], *, graph: bool, seconds: float) -> dict[str, float]:
    """Return the milliseconds of a call with the confirmed plans and without them."""
    calls = {"hopper": within(choices.CHOICES.plans, make()), "without": within(frozenset(), make())}
    times = measure(calls, graph=graph, seconds=seconds)
    return {**{f"{who}_ms": each for who, each in times.items()}, "gain": times["without"] / times["hopper"]}


def within(plans: frozenset[str], call: Call) -> Call:
    def run() -> Any:
        with taking(plans):
            return call()

    return run


@contextmanager
def taking(plans: frozenset[str]) -> Iterator[None]:
    """Restrict the table of choices to these plans inside the block."""
    before, choices.CHOICES = choices.CHOICES, choices.CHOICES.only(plans)
    try:
        yield
    finally:
        choices.CHOICES = before


def call_of(operation: Operation, args: tuple, options: dict[str, Any]) -> Call:
    return partial(operation, *args, **options)


@torch.inference_mode()
def plans() -> dict[str, Callable[[], Invocation]]:
    """Map each confirmed plan's name to a function that makes the last of its workloads."""
    found: dict[str, Callable[[], Invocation]] = {}
    for make in workloads():
        operation, args, options = make()
        plan = operation.parse(*args, **options).hopper_plan()
        if plan in choices.CHOICES.plans:
            found[plan] = make
    return found


def workloads() -> Iterator[Callable[[], Invocation]]:
    """Yield, for each workload of the benchmarks, a function that returns the operation and its arguments."""
    for name in HOPPER_CONVOLUTIONS:
        yield partial(convolution, name)
    for name in CONVOLUTIONS_8BIT:
        yield partial(convolution_8bit, name)
    for name in ATTENTIONS:
        yield lambda name=name: (attention, *bench_attention.arguments(name))
    for name in LINEARS:
        yield lambda name=name: (linear, *bench_linear.arguments(name))
    for name in GEGLUS:
        yield lambda name=name: (geglu, bench_geglu.arguments(name), {})
    for name in SWIGLUS:
        yield lambda name=name: (swiglu, bench_swiglu.arguments(name), {})
    for name in bench_linear_8bit.PLANS:
        yield lambda name=name: bench_linear_8bit.invocation(name, max(bench_linear_8bit.TOKENS))


def convolution(name: str) -> Invocation:
    args, options = bench_conv2d.hopper_arguments(name, HOPPER_CONVOLUTIONS)
    return conv2d, args, options | {"moments": True}


def convolution_8bit(name: str) -> Invocation:
    args, options = bench_conv2d_8bit.arguments(name)
    return conv2d, args, options | {"moments": True}


if __name__ == "__main__":
    main()
