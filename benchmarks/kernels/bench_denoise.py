"""The denoise step: ours, its torch reference eager and compiled, and diffusers' `scheduler.step`.

    python benchmarks/kernels/bench_denoise.py [--save [DIR]]

`fastdiff` is the step as the sampling loop runs it on a GPU. The model's output is bfloat16, and with guidance both
halves are in one tensor. A counter on the device selects the schedule's row and the noise. x_{t-1} and x0 are new
tensors, and the step is part of a CUDA graph. The reference runs the same way. diffusers' step reads numbers back from
the device, so a graph cannot capture it: it is timed as it runs, on bfloat16 pictures as in its pipelines, with the
noise that it draws itself and, if guided, DiTPipeline's guidance. `max_abs_err` is against the reference in float64;
`parity_max_abs_err` is our scheduler's step against diffusers' with the same noise in float32. `share` is the fraction
of the copy rate on a tensor of 2 GB; it can exceed 1 for a smaller tensor that is still in the L2 cache.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor

import fastdiff
from benchmarks.harness.operations import ceilings, compiled, kernel_row, randn
from benchmarks.harness.reports import needs_gpu, report
from benchmarks.shapes import DENOISES
from fastdiff.kernels.denoise import denoise_step
from fastdiff.tuning.timing import DEVICE, measure


class Sampler(NamedTuple):
    """diffusers' scheduler and ours, with the options of their step."""

    theirs: Any
    ours: Any
    options: Mapping[str, float] = MappingProxyType({})
    guidance_scale: float = 1.0  # 1: unguided


SAMPLERS = {
    "ddim": Sampler(diffusers.DDIMScheduler, fastdiff.DDIMScheduler),
    "ddim-guided": Sampler(diffusers.DDIMScheduler, fastdiff.DDIMScheduler, guidance_scale=4.0),
    "ddim-eta1": Sampler(diffusers.DDIMScheduler, fastdiff.DDIMScheduler, {"eta": 1.0}),
    "ddpm": Sampler(diffusers.DDPMScheduler, fastdiff.DDPMScheduler),
}
STEPS = 50
STEP = STEPS // 2  # the step that is timed


def main() -> None:
    needs_gpu()
    copy = ceilings()["copy_tbps"]
    report("denoise", (row(workload, sampler, copy) for workload in DENOISES for sampler in SAMPLERS))


@torch.inference_mode()
def row(workload: str, name: str, copy_tbps: float) -> dict[str, Any]:
    n, height = DENOISES[workload]
    sampler = SAMPLERS[name]
    schedule = sampler.ours().schedule(STEPS, **sampler.options).to(DEVICE)
    x_t = torch.randn(n, height, height, 3, device=DEVICE)
    outputs = randn(n if sampler.guidance_scale == 1 else 2 * n, height, height, 3)
    output, *unguided = outputs.split(n)
    step = torch.full((n,), STEP, dtype=torch.int32, device=DEVICE)
    scale = torch.full((n,), sampler.guidance_scale, device=DEVICE)
    options: dict[str, Any] = {"step": step, "guidance_scale": scale}
    if any(schedule.draws_noise):
        options["noise"] = torch.arange(n, device=DEVICE)  # the pictures' seeds
    if unguided:
        options |= {"unguided": unguided[0]}

    def step_by(run: Callable, x_t: Tensor = x_t) -> tuple[Tensor, Tensor]:
        return run(output, x_t, schedule.rows, schedule.options, **options)

    plain = denoise_step.reference
    runs: dict[str, Callable] = {"fastdiff": denoise_step, "eager": plain}
    if "noise" not in options:  # torch.compile cannot compile Philox: its constants exceed int32
        runs["compile"] = compiled(plain)
    truth, _ = step_by(plain, x_t.double())
    moved = sum(tensor.nbytes for tensor in (outputs, x_t, *step_by(plain))) + (8 * n if "noise" in options else 0)
    calls = {who: partial(step_by, run) for who, run in runs.items()}
    measured = kernel_row(f"{workload}-{name}", calls, truth, moved=moved, ceiling=copy_tbps)
    return measured | against_diffusers(sampler, x_t, output, *unguided)


def against_diffusers(sampler: Sampler, x_t: Tensor, output: Tensor, unguided: Tensor | None = None) -> dict[str, Any]:
    """Return the time of diffusers' step, and the error of our scheduler's step against it."""
    theirs, ours = sampler.theirs(), sampler.ours()
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(STEPS)
    timestep = int(theirs.timesteps[STEP])

    def take_step(scheduler: Any, dtype: torch.dtype, **options: Any) -> Tensor:
        guided = output.to(dtype)
        if unguided is not None:
            null = unguided.to(dtype)
            guided = null + sampler.guidance_scale * (guided - null)
        return scheduler.step(
            channels_first(guided), timestep, samples[dtype], **sampler.options, **options
        ).prev_sample

    samples = {dtype: channels_first(x_t.to(dtype)) for dtype in (torch.bfloat16, torch.float32)}
    times = measure({"diffusers": lambda: take_step(theirs, torch.bfloat16)}, graph=False)
    ends = [
        take_step(scheduler, torch.float32, generator=torch.Generator(DEVICE).manual_seed(0))
        for scheduler in (ours, theirs)
    ]
    return {"diffusers_ms": times["diffusers"], "parity_max_abs_err": (ends[0] - ends[1]).abs().max().item()}


def channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


if __name__ == "__main__":
    main()
