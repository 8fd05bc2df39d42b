"""Whole forwards of U-Nets and transformers against diffusers on the same weights: times and errors.

    python benchmarks/bench_models.py [WORKLOAD ...] [--save [DIR]] [--base REV]

On a GPU the models run in bfloat16, or in float32 without TF32 if the workload's name says so. diffusers runs eager
and under torch.compile (reduce-overhead, fused projections), both channels-last with cudnn.benchmark on. On a CPU the
models run in float32, and diffusers runs eager. Errors are against diffusers in float32, as fractions of its largest
output. `text_outside_ms` is our forward without the keys and values of its text, which a sampling loop computes before
the first step. `pictures_s` counts pictures of 50 DDIM steps per second, `plans_s` trajectories of 20 steps.
`first_result_s`, `new_resolution_s`, `weights_bytes` and the `peak_bytes` are measured with one model alone in a new
process with an empty Triton cache; `models/alone.py` defines them. `--base REV` instead compares our forwards with
another commit's, in alternation, and exits with 1 if one takes over 3 % longer (`harness/base.py`).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

import fastdiff
from benchmarks.harness.base import FORWARDS, compare_if_asked
from benchmarks.harness.operations import ceilings, launches
from benchmarks.harness.reports import chosen, environment, report
from benchmarks.models import sampling
from benchmarks.models.forwards import GPU, WORKLOADS
from fastdiff.checkpoints.weights import load_weights
from fastdiff.models.blocks.conditioning import Conditioning, Prompt
from fastdiff.models.prompt import PromptCheck
from fastdiff.tuning.forwards import dtype_of, in_dtype, inputs
from fastdiff.tuning.models import class_name
from fastdiff.tuning.timing import DEVICE, measure
from fastdiff.verification.peers import compile_diffusers

PEERS = ("eager", "compile")


def main() -> None:
    compare_if_asked(FORWARDS, WORKLOADS)
    names = chosen(WORKLOADS)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # errors are measured against float32
    tflops = ceilings()["matmul_bf16_tflops"] if GPU else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # an empty cache for torch.compile too
        report("models" if GPU else "models_cpu", (row(name, tflops) for name in names))


@torch.inference_mode()
def row(name: str, tflops: float | None) -> dict[str, Any]:
    """Return the times and errors of a workload."""
    config, batch, gflop = WORKLOADS[name]
    dtype = dtype_of(name)
    theirs, ours = build(config, dtype)
    exact = inputs(config, batch)
    expected = theirs(*exact).sample.float()
    theirs = theirs.to(dtype).to(memory_format=torch.channels_last if GPU else torch.preserve_format)
    given = in_dtype(exact, dtype)
    errors = {
        f"{who}_err": ((model(*given).sample.float() - expected).abs().max() / expected.abs().max()).item()
        for who, model in (("fastdiff", ours), ("eager", theirs))
    }
    calls = {"fastdiff": lambda: ours(*given), "eager": lambda: theirs(*given)}
    if isinstance(ours, fastdiff.UNet2DConditionModel):
        calls["text_outside"] = with_text_outside(ours, given)
    times = measure(calls, graph=False)
    return {
        "workload": name,
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "speedup": times["eager"] / times["fastdiff"],
        "floor_ms": gflop / tflops if tflops and gflop else None,
        "max_abs_err": errors["fastdiff_err"],
        "eager_err": errors["eager_err"],
        **(on_gpu(name, ours, theirs, given) if GPU else {}),
    }


def on_gpu(name: str, ours: Any, theirs: Any, given: tuple) -> dict[str, Any]:
    """The columns that need a GPU: launches, torch.compile, each model alone, and whole pictures or trajectories."""
    by_compile = compile_diffusers(theirs)
    rest = {
        "launches": launches(lambda: ours(*given)),
        "compile_first_s": seconds_of(lambda: by_compile(*given)),
        "compile_ms": measure({"compile": lambda: by_compile(*given)}, graph=False)["compile"],
        **in_new_process("fastdiff", name),
        **{f"{who}_peak_bytes": in_new_process(who, name)["peak_bytes"] for who in PEERS},
    }
    return rest | loops(ours, theirs, by_compile, given)


def loops(ours: Any, theirs: Any, by_compile: Any, given: tuple) -> dict[str, float]:
    """Return pictures or trajectories per second, for the models that a loop is measured for."""
    noise, _, *labels = given
    if isinstance(ours, fastdiff.UNet1DModel):
        what, sample, loop = "plans_s", sampling.plan, sampling.plan_loop
    elif isinstance(ours, fastdiff.UNet2DModel):
        what, sample, loop = "pictures_s", sampling.sample, sampling.loop
    else:
        return {}
    calls = {
        "fastdiff": lambda: sample(ours, noise, *labels),
        "eager": lambda: loop(theirs, noise, *labels),
        "compile": lambda: loop(by_compile, noise, *labels),
    }
    # the first of the two calls may still capture graphs
    return {f"{who}_{what}": len(noise) / min(seconds_of(call) for _ in range(2)) for who, call in calls.items()}


def in_new_process(who: str, name: str) -> dict[str, float]:
    """Run `models/alone.py` with an empty Triton cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, str(Path(__file__).parent / "models" / "alone.py"), who, name]
        variables = environment() | {"TRITON_CACHE_DIR": cache}
        said = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


def build(config: dict, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return diffusers' model in float32, and ours with the same weights in `dtype`."""
    torch.manual_seed(0)
    with DEVICE:  # the CPU takes long to draw the numbers of a large model
        theirs = getattr(diffusers, class_name(config))(**config).eval()
    with torch.device("meta"):
        ours = getattr(fastdiff, class_name(config)).from_config(config)
    load_weights(ours, theirs.state_dict(), source="benchmark", dtype=dtype, device=DEVICE)
    return theirs, ours


def with_text_outside(ours: fastdiff.UNet2DConditionModel, given: tuple[Any, ...]) -> Callable[[], Tensor]:
    """Return a forward of `given` that takes the keys and values of its text as computed here, like a sampling loop."""
    sample, timesteps, text, *rest = given
    check = PromptCheck(ours.config, ours.dtype, ours.device, len(sample))
    prompt = check.prompt(text, added_cond_kwargs=rest[-1] if rest else None)
    projected = ours.project_text(text)

    def predict(x: Tensor, timesteps: Tensor, prompt: Prompt) -> tuple[Tensor]:
        conditioning = Conditioning(ours.embed(timesteps, None, prompt), timesteps, (projected,))
        return (ours.predict(x.contiguous(), conditioning),)

    run = ours.graphed("text outside", predict)
    return lambda: ours.channels_first(run(ours.channels_last(sample), timesteps, prompt)[0])


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
