"""Measure one text-to-image pipeline alone in a process: the seconds of a picture, cold and warm, and GPU memory.

    python benchmarks/pictures/pictures_alone.py \\
        {fastdiff,offload,accelerate,eager,eager-offload,compile} FOLDER STEPS STARTED

`fastdiff` is our Pipeline of the FOLDER, `accelerate` is diffusers' pipeline with our models, and `eager` and `compile`
are diffusers' own. `offload` keeps each part of our pipeline on the GPU only while it runs; `eager-offload` uses
diffusers' enable_model_cpu_offload. Prints JSON for a row of `bench_text_to_image.py`:

    loaded_s           from STARTED (`time.time()` at the start of the process) to the models on the GPU
    first_picture_s    from STARTED to the first PNG
    picture_s          from the prompt to a PNG: the median of three, after two warm-up pictures
    new_size_s         ours only: the first picture of another size minus the third
    new_batch_s        ours only: the first batch of two pictures minus the third
    cold_peak_bytes    the peak of the GPU memory that torch reserves until the first picture
    peak_bytes         the peak during the three pictures
    picture_err        a picture of CHECK_STEPS against diffusers in float32: the RMS error over the picture's standard
                       deviation
"""

import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Not imported from fastdiff, so that diffusers' times do not include the import of fastdiff.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT = "a photograph of an astronaut riding a horse"
CHECK_STEPS = 5
REFERENCE = "reference.pt"  # in the pipeline's folder: noise, and its picture in float32

Draw = Callable[..., Any]  # keyword options of diffusers' pipelines -> images


def main() -> None:
    who, folder, steps, started = sys.argv[1:]
    torch.backends.cudnn.benchmark = True
    print(json.dumps(measure_alone(who, Path(folder), int(steps), float(started))))


def measure_alone(who: str, folder: Path, steps: int, started: float) -> dict[str, float]:
    """Return the results of one of WAYS."""
    draw = WAYS[who](folder)
    torch.cuda.synchronize()
    cold = {"loaded_s": time.time() - started}
    seconds_of(draw, num_inference_steps=steps)
    cold |= {"first_picture_s": time.time() - started, "cold_peak_bytes": torch.cuda.max_memory_reserved()}
    seconds_of(draw, num_inference_steps=steps)  # may capture graphs
    torch.cuda.empty_cache()  # keeps the memory of CUDA graphs
    torch.cuda.reset_peak_memory_stats()
    warm = {
        "picture_s": statistics.median(seconds_of(draw, num_inference_steps=steps) for _ in range(3)),
        "peak_bytes": torch.cuda.max_memory_reserved(),
    }
    latents, expected = torch.load(folder / REFERENCE)
    picture = draw_reference(draw, latents)
    error = (picture - expected).square().mean().sqrt() / expected.std()
    return warm | cold | {"picture_err": error.item()} | (new_shapes(draw, expected.shape) if who in OURS else {})


def new_shapes(draw: Draw, shape: Sequence[int]) -> dict[str, float]:
    """Return the one-time seconds of a new size and of a new batch, after pictures of shape (N, C, H, W)."""
    narrow = {"height": shape[2], "width": 3 * shape[3] // 4}
    return {"new_size_s": first_cost(draw, **narrow), "new_batch_s": first_cost(draw, num_images_per_prompt=2)}


def first_cost(draw: Draw, **options: int) -> float:
    """Return how many seconds longer the first call takes than the third."""
    first, _, third = (seconds_of(draw, num_inference_steps=CHECK_STEPS, **options) for _ in range(3))
    return first - third


def draw_reference(draw: Draw, latents: Tensor) -> Tensor:
    """Draw the picture for the comparison, (1, 3, H, W) in [0, 1], on the CPU."""
    return draw(latents=latents, num_inference_steps=CHECK_STEPS, output_type="pt").float().cpu()


def seconds_of(draw: Draw, **options: int) -> float:
    """Return the seconds from the prompt to the PNG files."""
    start = time.perf_counter()
    for image in draw(**options):
        image.save(io.BytesIO(), "PNG")
    return time.perf_counter() - start


def of_fastdiff(folder: Path, *, offload: bool = False) -> Draw:
    import fastdiff

    pipe = fastdiff.Pipeline.from_pretrained(folder, device=DEVICE, dtype=torch.bfloat16, offload=offload)
    return lambda **options: pipe(prompt=PROMPT, **options).images


def of_diffusers(pipe: Any) -> Draw:
    return lambda **options: pipe(PROMPT, **options).images


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16, *, offload: bool = False) -> Any:
    """Load diffusers' pipeline from the folder."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    if offload:
        pipe.enable_model_cpu_offload(device=DEVICE)
    else:
        pipe.to(DEVICE)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def channels_last(pipe: Any) -> Any:
    """Make U-Net and VAE channels-last, which diffusers' manual recommends for speed."""
    for model in (pipe.unet, pipe.vae):
        model.to(memory_format=torch.channels_last)
    return pipe


def accelerated(folder: Path) -> Draw:
    import fastdiff

    return of_diffusers(fastdiff.accelerate(loaded(folder)))


def eager_pipeline(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return channels_last(loaded(folder, dtype))


def compiled_pipeline(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Load diffusers' pipeline, whose U-Net and VAE are compiled when they are first called."""
    from benchmarks.models.alone import compile_diffusers

    pipe = eager_pipeline(folder, dtype)
    pipe.unet = compile_diffusers(pipe.unet)
    pipe.vae.decode = torch.compile(pipe.vae.decode, mode="reduce-overhead", fullgraph=True)
    return pipe


OURS: dict[str, Callable[[Path], Draw]] = {
    "fastdiff": of_fastdiff,
    "offload": partial(of_fastdiff, offload=True),
    "accelerate": accelerated,
}
WAYS = OURS | {
    "eager": lambda folder: of_diffusers(eager_pipeline(folder)),
    "eager-offload": lambda folder: of_diffusers(channels_last(loaded(folder, offload=True))),
    "compile": lambda folder: of_diffusers(compiled_pipeline(folder)),
}


if __name__ == "__main__":
    main()
