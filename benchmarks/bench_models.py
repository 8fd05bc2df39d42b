"""Whole forwards of U-Nets and transformers against diffusers' on the same weights, each time beside its error.

    python benchmarks/bench_models.py [--save [DIR]] [WORKLOAD ...]

On a GPU in bfloat16: diffusers eager, and under torch.compile (reduce-overhead, fused projections), both channels-last
with cudnn.benchmark on. On a CPU in float32: diffusers eager. Errors are against diffusers in float32, as fractions of
the largest output; `first_result_s` is ours in a new process with an empty Triton cache, the start of Python left out,
`new_resolution_s` that of a picture half as wide and high again after it. `images_s` counts pictures of 50 DDIM steps.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import diffusers
import sampling
import torch
from harness import DEVICE, ceilings, launches, measure, peak_bytes, report
from shapes import MODELS_CPU, MODELS_GPU
from torch import Tensor

import fastdiff
from fastdiff.checkpoints.weights import load_weights

GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
WORKLOADS = MODELS_GPU if GPU else MODELS_CPU


def main() -> None:
    if "--first" in sys.argv:
        print(json.dumps(first_result_seconds(sys.argv[-1])))
        return
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # of the float32 that errors are measured from
    tflops = ceilings()["matmul_bf16_tflops"] if GPU else None
    names = [name for name in sys.argv[1:] if name in WORKLOADS] or list(WORKLOADS)
    report("models" if GPU else "models_cpu", (row(name, tflops) for name in names))


@torch.inference_mode()
def row(name: str, tflops: float | None) -> dict[str, Any]:
    """Times and errors of a workload."""
    config, batch, gflop = WORKLOADS[name]
    theirs, ours = build(config)
    sample, *condition = inputs(config, batch)
    expected = theirs(sample, *condition).sample.float()
    theirs = theirs.to(DEVICE, DTYPE, memory_format=torch.channels_last if GPU else torch.preserve_format)
    given = sample.to(DTYPE), *condition
    errors = {
        f"{who}_err": ((model(*given).sample.float() - expected).abs().max() / expected.abs().max()).item()
        for who, model in (("fastdiff", ours), ("eager", theirs))
    }
    times = measure({"fastdiff": lambda: ours(*given), "eager": lambda: theirs(*given)}, graph=False)
    return {
        "workload": name,
        "fastdiff_ms": times["fastdiff"],
        "eager_ms": times["eager"],
        "speedup": times["eager"] / times["fastdiff"],
        "floor_ms": gflop / tflops if tflops and gflop else None,
        "max_abs_err": errors["fastdiff_err"],
        "eager_err": errors["eager_err"],
        "peak_bytes": peak_bytes(lambda: ours(*given)),
        **(on_gpu(name, ours, theirs, given) if GPU else {}),
    }


def on_gpu(name: str, ours: torch.nn.Module, theirs: torch.nn.Module, given: tuple) -> dict[str, Any]:
    """The rest of a row: launches, torch.compile, cold starts, and whole pictures where the model draws pixels."""
    compiled, seconds = compile_(theirs, given)
    rest = {
        "launches": launches(lambda: ours(*given)),
        "compile_ms": measure({"compile": lambda: compiled(*given)}, graph=False)["compile"],
        "compile_first_s": seconds,
        **in_new_process(name),
    }
    if isinstance(ours, fastdiff.UNet2DModel):
        noise, _, labels = given
        calls = {
            "fastdiff": lambda: sampling.sample(ours, noise, labels),
            "eager": lambda: sampling.loop(theirs, noise, labels, DTYPE),
            "compile": lambda: sampling.loop(compiled, noise, labels, DTYPE),
        }
        rest |= {f"{who}_images_s": len(noise) / seconds_of(call) for who, call in calls.items()}
    return rest


def build(config: dict) -> tuple[torch.nn.Module, torch.nn.Module]:
    """diffusers' model in float32 and ours with its weights in DTYPE."""
    torch.manual_seed(0)
    theirs = getattr(diffusers, class_name(config))(**config).to(DEVICE).eval()
    with torch.device("meta"):
        ours = getattr(fastdiff, class_name(config)).from_config(config)
    load_weights(ours, theirs.state_dict(), source="benchmark", dtype=DTYPE, device=DEVICE)
    return theirs, ours


def class_name(config: dict) -> str:
    return "DiTTransformer2DModel" if "patch_size" in config else "UNet2DModel"


def inputs(config: dict, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a model of `config` is given: sample, timesteps, labels."""
    side, labelled = config["sample_size"], config.keys() & {"num_class_embeds", "num_embeds_ada_norm"}
    sample = torch.randn(batch, config.get("in_channels", 3), side, side, device=DEVICE)
    labels = torch.zeros(batch, dtype=torch.int64, device=DEVICE) if labelled else None
    return sample, torch.full((batch,), 500, device=DEVICE), labels


def compile_(theirs: torch.nn.Module, given: tuple) -> tuple[torch.nn.Module, float]:
    """diffusers' model under torch.compile, and the seconds to its first result."""
    torch._dynamo.reset()
    if hasattr(theirs, "fuse_qkv_projections"):  # diffusers' DiT has no such method
        theirs.fuse_qkv_projections()
    compiled = torch.compile(theirs, mode="reduce-overhead", fullgraph=True)
    start = time.perf_counter()
    compiled(*given)
    torch.cuda.synchronize()
    return compiled, time.perf_counter() - start


def seconds_of(call: Callable) -> float:
    """Of the faster of two calls: the first may still capture graphs."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def in_new_process(name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--first", name]
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@torch.inference_mode()
def first_result_seconds(name: str) -> dict[str, float]:
    """From the start of the process's first model to its first result, and to one at half as many pixels again."""
    config, batch, _ = WORKLOADS[name]
    torch.zeros(1, device=DEVICE)
    start = time.perf_counter()
    with DEVICE:  # random numbers of a large model take the CPU long
        model = getattr(fastdiff, class_name(config)).from_config(config).to(DTYPE)
    sample, *condition = inputs(config, batch)
    seconds = {}
    for what, scale in (("first_result_s", 1), ("new_resolution_s", 1.5)):
        side = int(scale * sample.shape[-1])
        given = sample.repeat(1, 1, 2, 2)[..., :side, :side].to(DTYPE)
        model(given, *condition)
        torch.cuda.synchronize()
        seconds[what] = time.perf_counter() - start
        start = time.perf_counter()
    return seconds


if __name__ == "__main__":
    main()
