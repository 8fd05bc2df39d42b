"""The denoise step: ours, its torch reference and diffusers' `scheduler.step`, each time beside the parity of the step.

    python benchmarks/bench_denoise.py [--save [DIR]]

`fastdiff` is the step as the sampling loop takes it: row and noise by a counter on the device, into given buffers, with
the input of the next step; on a GPU in a graph replay, as `reference` is. diffusers' step reads numbers back from the
device and cannot be replayed: it is timed as it runs, with the noise that it draws itself.
"""

from typing import Any

import diffusers
import torch
from harness import DEVICE, measure, report
from shapes import DENOISES

import fastdiff
from fastdiff.kernels.denoise import StepBuffers, denoise_step

SAMPLERS = {
    "ddim": (diffusers.DDIMScheduler, fastdiff.DDIMScheduler, {}),
    "ddim-eta1": (diffusers.DDIMScheduler, fastdiff.DDIMScheduler, {"eta": 1.0}),
    "ddpm": (diffusers.DDPMScheduler, fastdiff.DDPMScheduler, {}),
}
STEPS = 50


def main() -> None:
    report("denoise", [row(workload, sampler) for workload in DENOISES for sampler in SAMPLERS])


@torch.inference_mode()
def row(workload: str, sampler: str) -> dict[str, Any]:
    n, height = DENOISES[workload]
    theirs_class, ours_class, options = SAMPLERS[sampler]
    theirs, ours = theirs_class(), ours_class()
    theirs.set_timesteps(STEPS)
    schedule = ours.schedule(STEPS, **options).to(DEVICE)
    x_t, output = torch.randn(2, n, height, height, 3, device=DEVICE)
    step = torch.full((1,), STEPS // 2, dtype=torch.int32, device=DEVICE)
    seeds = torch.arange(n, device=DEVICE) if any(schedule.draws_noise) else None
    buffers = StepBuffers(torch.empty_like(x_t), torch.empty_like(x_t), torch.empty_like(x_t, dtype=torch.bfloat16))

    def ours_step(run=denoise_step):
        return run(output, x_t, schedule.rows, schedule.options, noise=seeds, step=step, out=buffers)

    timestep = int(theirs.timesteps[STEPS // 2])
    sample, model_output = (tensor.permute(0, 3, 1, 2).contiguous() for tensor in (x_t, output))

    def their_step():
        return theirs.step(model_output, timestep, sample, **options)

    calls = {"fastdiff": ours_step, "reference": lambda: ours_step(denoise_step.reference)}
    times = measure(calls) | measure({"diffusers": their_step}, graph=False)
    return {
        "workload": f"{workload}-{sampler}",
        **{f"{who}_us": 1e3 * milliseconds for who, milliseconds in times.items()},
        "max_abs_err": parity(ours, theirs, output, x_t, timestep, options),
    }


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
