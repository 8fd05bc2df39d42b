"""The denoise step: ours, its torch reference eager and compiled, and diffusers' `scheduler.step`.

    python benchmarks/bench_denoise.py [--save [DIR]]

`fastdiff` is the step as the sampling loop takes it: row and noise by a counter on the device; on a GPU in a graph
replay, as the reference is. diffusers' step reads numbers back from the device and cannot be replayed: it is timed as
it runs, with the noise that it draws itself. `max_abs_err` is against the reference in float64, `parity_max_abs_err`
that of our scheduler's step against diffusers', with the same noise. `share` is the fraction of the copy rate on a
tensor of 2 GB.
"""

from functools import partial
from typing import Any

import diffusers
import torch
from harness import DEVICE, ceilings, compiled, kernel_row, measure, needs_gpu, report
from shapes import DENOISES

import fastdiff
from fastdiff.kernels.denoise import denoise_step

SAMPLERS = {
    "ddim": (diffusers.DDIMScheduler, fastdiff.DDIMScheduler, {}),
    "ddim-eta1": (diffusers.DDIMScheduler, fastdiff.DDIMScheduler, {"eta": 1.0}),
    "ddpm": (diffusers.DDPMScheduler, fastdiff.DDPMScheduler, {}),
}
STEPS = 50


def main() -> None:
    needs_gpu("torch's own functions")
    copy = ceilings()["copy_tbps"]
    report("denoise", (row(workload, sampler, copy) for workload in DENOISES for sampler in SAMPLERS))


@torch.inference_mode()
def row(workload: str, sampler: str, copy_tbps: float) -> dict[str, Any]:
    n, height = DENOISES[workload]
    theirs_class, ours_class, options = SAMPLERS[sampler]
    theirs, ours = theirs_class(), ours_class()
    theirs.set_timesteps(STEPS)
    schedule = ours.schedule(STEPS, **options).to(DEVICE)
    x_t, output = torch.randn(2, n, height, height, 3, device=DEVICE)
    step = torch.full((1,), STEPS // 2, dtype=torch.int32, device=DEVICE)
    seeds = torch.arange(n, device=DEVICE) if any(schedule.draws_noise) else None

    def step_by(run, x_t=x_t):
        return run(output, x_t, schedule.rows, schedule.options, noise=seeds, step=step)

    plain = denoise_step.reference
    runs = {"fastdiff": denoise_step, "eager": plain}
    if seeds is None:  # torch.compile takes no Philox: its constants pass the range of int32
        runs["compile"] = compiled(plain)
    calls = {who: partial(step_by, run) for who, run in runs.items()}
    truth, _ = step_by(plain, x_t.double())
    moved = output.nbytes + 3 * x_t.nbytes  # x_t is read, x_{t-1} and x0 are written
    measured = kernel_row(f"{workload}-{sampler}", calls, truth, moved=moved, ceiling=copy_tbps)

    timestep = int(theirs.timesteps[STEPS // 2])
    sample, model_output = (tensor.permute(0, 3, 1, 2).contiguous() for tensor in (x_t, output))
    diffusers_ms = measure({"step": lambda: theirs.step(model_output, timestep, sample, **options)}, graph=False)
    parities = {"parity_max_abs_err": parity(ours, theirs, output, x_t, timestep, options)}
    return measured | {"diffusers_ms": diffusers_ms["step"]} | parities


def parity(ours, theirs, output, x_t, timestep: int, options: dict[str, Any]) -> float:
    """Of a step by our scheduler and by diffusers', with the same generator's noise."""
    ours.set_timesteps(STEPS)
    sample, model_output = (tensor.permute(0, 3, 1, 2).contiguous() for tensor in (x_t, output))
    steps = [
        scheduler.step(
            model_output, timestep, sample, generator=torch.Generator(DEVICE).manual_seed(0), **options
        ).prev_sample
        for scheduler in (ours, theirs)
    ]
    return (steps[0] - steps[1]).abs().max().item()


if __name__ == "__main__":
    main()
