"""Many pictures as diffusers' manual draws them: accelerate's `split_between_processes`, one process per GPU.

    torchrun --standalone --nproc-per-node CARDS benchmarks/pictures/bulk_loops.py \\
        {eager,compile} MODEL FOLDER OUT SECONDS

Draws batches and writes their PNGs until SECONDS have passed since the end of the second batch. Prints a line of JSON
per batch: the rank, the number of pictures, and the time by this host's clock in seconds.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.pictures.bulk_folders import TASKS, Task

WARM = 2  # batches: the second may capture graphs
MANY = 2**20  # seeds, more than are drawn

Draw = Callable[[list[int]], list[Any]]  # seeds -> PIL images


def main() -> None:
    from accelerate import PartialState

    run(PartialState(cpu=not torch.cuda.is_available()), *sys.argv[1:])


def run(state: Any, who: str, name: str, folder: str, out: str, seconds: str) -> None:
    """Draw this process's share of the seeds; `state` is accelerate's PartialState."""
    task, dtype = TASKS[name], torch.bfloat16 if state.device.type == "cuda" else torch.float32
    draw = (of_prompt if task.prompt else of_pixels)(task, Path(folder), state.device, dtype, who == "compile")
    with state.split_between_processes(list(range(MANY))) as seeds:
        batches, end = 0, float("inf")
        while batches < WARM + 1 or time.time() < end:
            batch = seeds[batches * task.batch : (batches + 1) * task.batch]
            for seed, image in zip(batch, draw(batch), strict=True):
                image.save(Path(out, f"{seed}.png"))
            batches += 1
            if batches == WARM:
                end = time.time() + float(seconds)
            line = json.dumps({"rank": state.process_index, "count": len(batch), "at": time.time()})
            sys.stdout.write(f"{line}\n")  # in one write, or the processes' lines mix


def generators(seeds: list[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def of_prompt(task: Task, folder: Path, device: torch.device, dtype: torch.dtype, compiled: bool) -> Draw:
    """Return diffusers' text-to-image pipeline, with U-Net and VAE channels-last and compiled as its manual says."""
    import diffusers

    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    for model in (pipe.unet, pipe.vae):
        model.to(memory_format=torch.channels_last)
    if compiled:
        pipe.unet = compile_model(pipe.unet)
        pipe.vae.decode = torch.compile(pipe.vae.decode, mode="reduce-overhead", fullgraph=True)
    options = {"num_inference_steps": task.steps, "guidance_scale": task.guidance}
    return lambda seeds: pipe([task.prompt] * len(seeds), generator=generators(seeds), **options).images


def of_pixels(task: Task, folder: Path, device: torch.device, dtype: torch.dtype, compiled: bool) -> Draw:
    """Return a DDIM loop over diffusers' U-Net, guided if there are labels (diffusers' pipeline has no guidance)."""
    import diffusers

    unet: Any = diffusers.UNet2DModel.from_pretrained(folder / "unet", torch_dtype=dtype).to(device).eval()
    unet = compile_model(unet) if compiled else unet
    scheduler = diffusers.DDIMScheduler.from_pretrained(folder / "scheduler")
    scheduler.set_timesteps(task.steps, device=device)
    config = unet.config
    shape = (config.in_channels, config.sample_size, config.sample_size)

    @torch.inference_mode()
    def draw(seeds: list[int]) -> list[Any]:
        x = torch.stack([torch.randn(shape, generator=each) for each in generators(seeds)]).to(device, dtype)
        labels = torch.tensor([seed % task.labels for seed in seeds], device=device) if task.labels else None
        for t in scheduler.timesteps:
            x = scheduler.step(predict(unet, x, t, labels, task), t, x).prev_sample
        pixels = (x.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        return diffusers.DDIMPipeline.numpy_to_pil(pixels)

    return draw


def predict(unet: Any, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor | None, task: Task) -> torch.Tensor:
    """Predict the noise in x (N, C, H, W), with the guidance of Ho and Salimans 2022 (arXiv 2207.12598)."""
    if labels is None:
        return unet(x, t).sample
    both = torch.cat([labels, torch.full_like(labels, task.labels)])
    given, null = unet(torch.cat([x, x]), t, both).sample.chunk(2)
    return null + task.guidance * (given - null)


def compile_model(model: Any) -> Any:
    from benchmarks.models.alone import compile_diffusers

    return compile_diffusers(model)


if __name__ == "__main__":
    main()
