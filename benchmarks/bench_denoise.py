"""Denoise step: ours against diffusers' `scheduler.step`, on the device present.

    python benchmarks/bench_denoise.py

A table for people; the last line is one JSON document. Each time stands beside the parity of the same step.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable

import diffusers
import torch
from torch import Tensor

import fastdiff
from fastdiff.kernels.denoise import denoise_step, philox_normal

SHAPES = ((1, 3, 64, 64), (4, 3, 64, 64), (8, 3, 256, 256))
SAMPLERS = {
    "ddim": (diffusers.DDIMScheduler, fastdiff.DDIMScheduler, {}),
    "ddim-eta1": (diffusers.DDIMScheduler, fastdiff.DDIMScheduler, {"eta": 1.0}),
    "ddpm": (diffusers.DDPMScheduler, fastdiff.DDPMScheduler, {}),
}
STEPS = 50
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(call: Callable[[], object], repeats: int = 50) -> float:
    """Median time of a call in microseconds, after three that are not counted."""
    times = []
    for i in range(repeats + 3):
        start = time.perf_counter()
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def bench(name: str, shape: tuple[int, ...]) -> dict[str, object]:
    """Times of a step by diffusers, by our class, and as the pipeline takes it, with the noise it draws."""
    theirs_class, ours_class, options = SAMPLERS[name]
    theirs, ours = theirs_class(), ours_class()
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(STEPS)
    sample, output = torch.randn((2, *shape), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    index = STEPS // 2
    timestep = int(theirs.timesteps[index])

    def step(scheduler) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(0)
        return scheduler.step(output, timestep, sample, generator=generator, **options).prev_sample

    schedule = ours.schedule(STEPS, **options).to(DEVICE)
    seeds = torch.arange(shape[0], device=DEVICE)
    x_t, model_output = (tensor.movedim(1, -1).contiguous() for tensor in (sample, output))

    def pipeline_step() -> Tensor:
        noise = philox_normal(seeds, index, x_t.shape[1:]) if schedule.draws_noise[index] else None
        return denoise_step(model_output, x_t, schedule.rows[index], schedule.options, noise=noise)[0]

    expected = step(theirs)
    return {
        "workload": f"denoise-{name}-{'x'.join(map(str, shape))}",
        "diffusers_us": measure(lambda: step(theirs)),
        "fastdiff_us": measure(lambda: step(ours)),
        "fastdiff_philox_us": measure(pipeline_step),
        "max_abs_err": (step(ours) - expected).abs().max().item(),
    }


def main() -> None:
    rows = [bench(name, shape) for shape in SHAPES for name in SAMPLERS]
    print(f"{'workload':32}{'diffusers':>12}{'fastdiff':>12}{'with Philox':>12}{'max error':>12}   (us)")
    for row in rows:
        times = (row["diffusers_us"], row["fastdiff_us"], row["fastdiff_philox_us"])
        print(f"{row['workload']:32}" + "".join(f"{t:12.0f}" for t in times) + f"{row['max_abs_err']:12.1e}")
    machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "threads": torch.get_num_threads()}
    print(json.dumps({"machine": machine, **versions, "rows": rows}))


if __name__ == "__main__":
    main()
