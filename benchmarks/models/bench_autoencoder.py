"""Encoding and decoding with the VAE of Stable Diffusion and SDXL, against diffusers with the same weights.

    python benchmarks/models/bench_autoencoder.py [WORKLOAD ...] [--save [DIR]]

Needs a GPU. diffusers runs eager and under torch.compile (reduce-overhead), both channels-last with cudnn.benchmark on,
in the dtype of the workload's name. In float16 ours computes in float32, as the config's force_upcast requires. Errors
are relative to diffusers in float32, as fractions of its largest output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor

import fastdiff
from benchmarks.harness.operations import launches, peak_bytes
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.models.stable_diffusion import SDXL_VAE
from fastdiff.checkpoints.weights import load_weights
from fastdiff.tuning.timing import DEVICE, measure

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WORKLOADS = {  # half, pictures, pixels per side, dtype
    f"{half}-{pixels}-b{pictures}-{dtype}": (half, pictures, pixels, dtype)
    for half in ("decode", "encode")
    for dtype in DTYPES
    for pictures, pixels in ((1, 512), (4, 512), (1, 1024))
}


def main() -> None:
    needs_gpu()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # errors are measured against float32
    report("autoencoder", map(row, chosen(WORKLOADS)))


def run(half: str, model: Any, x: Tensor) -> Tensor:
    """Return the decoded pictures, or the parameters of the encoded distribution."""
    return model.decode(x).sample if half == "decode" else model.encode(x).latent_dist.parameters


@torch.inference_mode()
def row(name: str) -> dict[str, Any]:
    """Return the times, errors and memory of a workload."""
    half, pictures, pixels, dtype = WORKLOADS[name]
    theirs, ours = build(SDXL_VAE, DTYPES[dtype])
    channels, side = (4, pixels // ours.config.scale) if half == "decode" else (3, pixels)
    x = torch.randn(pictures, channels, side, side, device=DEVICE)
    expected = run(half, theirs, x)
    theirs.to(DTYPES[dtype]).to(memory_format=torch.channels_last)
    given = x.to(DTYPES[dtype])
    compiled = torch.compile(partial(run, half, theirs), mode="reduce-overhead")
    calls: dict[str, Callable[[], Tensor]] = {
        "fastdiff": lambda: run(half, ours, given),
        "eager": lambda: run(half, theirs, given),
        "compile": lambda: compiled(given),
    }
    largest = expected.abs().max()
    errors = {who: ((call().float() - expected).abs().max() / largest).item() for who, call in calls.items()}
    times = measure(calls, graph=False)
    ours.release_graphs()
    ours.use_graphs = False  # a graph's memory is not part of any call
    return {
        "workload": name,
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "max_abs_err": errors["fastdiff"],
        "eager_err": errors["eager"],
        "launches": launches(calls["fastdiff"]),
        **{f"{who}_peak_bytes": peak_bytes(calls[who]) for who in ("fastdiff", "eager")},
    }


def build(config: dict, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return diffusers' model in float32, and ours with the same weights in `dtype`."""
    torch.manual_seed(0)
    theirs = diffusers.AutoencoderKL(**config).to(DEVICE).eval()
    with torch.device("meta"):
        ours = fastdiff.AutoencoderKL.from_config(config)
    load_weights(ours, theirs.state_dict(), source="benchmark", dtype=dtype, device=DEVICE)
    return theirs, ours


if __name__ == "__main__":
    main()
