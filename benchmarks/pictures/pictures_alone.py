"""A pipeline of a text alone in its process: the seconds of a picture, cold and warm, and the memory that it takes.

    python benchmarks/pictures/pictures_alone.py \\
        {fastdiff,offload,accelerate,eager,eager-offload,compile} FOLDER STEPS STARTED

`fastdiff` is our Pipeline of the FOLDER, `accelerate` diffusers' pipeline with our models in it, `eager` and `compile`
diffusers' own; `offload` has each part on the GPU only while it works, `eager-offload` by enable_model_cpu_offload.
Prints JSON, of which `bench_text_to_image.py` makes a row:

    loaded_s           from STARTED, when the process began (`time.time()`), to the models on the GPU
    first_picture_s    from STARTED to the first PNG
    picture_s          from the prompt to a PNG, the median of three, after two
    new_size_s         of ours: by how much the first picture of another size takes longer than the third
    new_batch_s        of ours: likewise, of two pictures at once
    cold_peak_bytes    the most that torch held of the GPU's memory until the first picture
    peak_bytes         the most that it holds during the three
    picture_err        of a picture of CHECK_STEPS, in the root mean square, against diffusers in float32; a fraction of
                       the picture's own about its mean
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

# Its own, so that the seconds of diffusers have no import of fastdiff in them.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT = "a photograph of an astronaut riding a horse"
CHECK_STEPS = 5
REFERENCE = "reference.pt"  # beside the folder's parts: noise and the picture that float32 makes of it

Draw = Callable[..., Any]  # of the options of diffusers' pipelines by their names -> images


def main() -> None:
    who, folder, steps, started = sys.argv[1:]
    torch.backends.cudnn.benchmark = True
    print(json.dumps(measure_alone(who, Path(folder), int(steps), float(started))))


def measure_alone(who: str, folder: Path, steps: int, started: float) -> dict[str, float]:
    """The numbers of a pipeline of WAYS."""
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
    """Return the seconds that a new size costs once, and a new batch, beside pictures (N, C, H, W); in few steps."""
    narrow = {"height": shape[2], "width": 3 * shape[3] // 4}
    return {"new_size_s": first_cost(draw, **narrow), "new_batch_s": first_cost(draw, num_images_per_prompt=2)}


def first_cost(draw: Draw, **options: int) -> float:
    """Seconds by which the first call takes longer than the third."""
    first, _, third = (seconds_of(draw, num_inference_steps=CHECK_STEPS, **options) for _ in range(3))
    return first - third


def draw_reference(draw: Draw, latents: Tensor) -> Tensor:
    """The picture that is compared, (1, 3, H, W) in [0, 1], on the CPU."""
    return draw(latents=latents, num_inference_steps=CHECK_STEPS, output_type="pt").float().cpu()


def seconds_of(draw: Draw, **options: int) -> float:
    """Seconds from the prompt to PNG files."""
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


def loaded(folder: Path, *, offload: bool = False) -> Any:
    """diffusers' pipeline of the folder."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    if offload:
        pipe.enable_model_cpu_offload(device=DEVICE)
    else:
        pipe.to(DEVICE)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def channels_last(pipe: Any) -> Any:
    """The pipeline laid out as diffusers' manual does for speed."""
    for model in (pipe.unet, pipe.vae):
        model.to(memory_format=torch.channels_last)
    return pipe


def accelerated(folder: Path) -> Draw:
    import fastdiff

    return of_diffusers(fastdiff.accelerate(loaded(folder)))


def compiled(folder: Path) -> Draw:
    from benchmarks.models.alone import compile_diffusers

    pipe = channels_last(loaded(folder))
    pipe.unet = compile_diffusers(pipe.unet)
    pipe.vae.decode = torch.compile(pipe.vae.decode, mode="reduce-overhead", fullgraph=True)
    return of_diffusers(pipe)


OURS: dict[str, Callable[[Path], Draw]] = {
    "fastdiff": of_fastdiff,
    "offload": partial(of_fastdiff, offload=True),
    "accelerate": accelerated,
}
WAYS = OURS | {
    "eager": lambda folder: of_diffusers(channels_last(loaded(folder))),
    "eager-offload": lambda folder: of_diffusers(channels_last(loaded(folder, offload=True))),
    "compile": compiled,
}


if __name__ == "__main__":
    main()
