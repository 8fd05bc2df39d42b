"""Image to image, inpainting, hires, and a prompt to a PNG: fastdiff beside diffusers, eager and under torch.compile.

    python benchmarks/pictures_in/bench_pictures_in.py [WORKLOAD ...] [--save [DIR]] [--budget SECONDS] [--dtype DTYPE]

A call begins with prompts that were not encoded before and with PIL images, and ends with PIL images; `prompt-to-png`
also writes them with PIL. Each way of running a workload has its own copy of the same random weights, on the same GPU
at the same time, and the ways take turns. Each result begins with its way, `fastdiff`, `eager` or `compile`:

    s           the seconds of a call: the median of ROUNDS turns
    step_ms     milliseconds of a step: how much longer a call with more steps takes. Both parts of hires count.
    peak_bytes  GPU memory that torch reserves for this way: weights, CUDA graphs and activations
    err         the RMS difference of the latents from diffusers' eager ones, over their standard deviation. All draw
                the noise of one generator.
    first_s     the seconds of the first call, which compiles

diffusers is channels-last with cudnn.benchmark. `compile` compiles its U-Net as `bench_models.py` does, with CUDA
graphs and fused projections, once for each size. float16 with a VAE whose config says `force_upcast`, or says nothing
of it, computes that VAE in float32: in fastdiff always, in diffusers only for SDXL.

The benchmark begins nothing that would end after `--budget` seconds: without time for torch.compile, a row has no
`compile`. `--tiny` tries the benchmark on tiny models and few steps, on any machine.
"""

import gc
import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from benchmarks.harness.reports import PARSER, chosen, command_line, needs_gpu, report
from benchmarks.pictures.bench_png import photograph
from benchmarks.pictures_in import pipelines
from benchmarks.pictures_in.pipelines import WAYS, Theirs
from fastdiff.tuning.timing import DEVICE
from fastdiff.verification.peers import held_bytes, reserved_bytes

ROUNDS, FEWEST = 5, 3  # turns of each way; and as many if the time is short
SHORT = 5  # a call of 1 / SHORT of the steps warms up, and is subtracted for the time of a step
MOST = 0.2  # err: rounding gives some percent, another picture about 140
TINY_STEPS = 6
PROMPT = "a photograph of an astronaut riding a horse"
GPU = DEVICE.type == "cuda"

Draw = Callable[..., Any]  # a way's pipelines, the trained size in pixels, options -> images or latents


@dataclass(frozen=True)
class Workload:
    """A model and two functions that draw the same with it."""

    model: str  # of MODELS
    steps: int
    ours: Draw
    theirs: Draw
    run: Callable[[int], int]  # calls of the U-Net for a number of steps
    measuring: float  # seconds that a row may take without torch.compile
    compiling: float  # seconds that torch.compile may take
    pictures: int = 1


def main() -> None:
    torch._dynamo.config.automatic_dynamic_shapes = False  # hires: its second size would be compiled for all sizes
    measure("pictures_in", WORKLOADS, WAYS)


def measure(source: str, workloads: Mapping[str, Workload], ways: Mapping[str, Callable[[Any], Any]]) -> None:
    """Measure the workloads that the command names, and report them as the results of `source`."""
    PARSER.add_argument("--budget", type=float, default=500.0, help="seconds (default: 500)")
    PARSER.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: bfloat16")
    PARSER.add_argument("--tiny", action="store_true", help="tiny models and few steps, on any machine")
    names, options = chosen(workloads), command_line()
    if options.tiny:
        pipelines.use_tiny_configs()
    else:
        needs_gpu()
    torch.backends.cudnn.benchmark = True
    end = time.monotonic() + options.budget
    found = rows(names, options.dtype, end, tiny=options.tiny, workloads=workloads, ways=ways)
    report(source, found, by=("workload", "dtype"))


def rows(
    names: list[str],
    dtype: str,
    end: float,
    *,
    tiny: bool,
    workloads: Mapping[str, Workload] | None = None,
    ways: Mapping[str, Callable[[Any], Any]] = WAYS,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of workloads until the time `end`. The default workloads are WORKLOADS."""
    model, pipe = "", None
    for name in names:
        workload = (WORKLOADS if workloads is None else workloads)[name]
        if time.monotonic() + workload.measuring > end:
            print(f"no time for {name}", flush=True)
            continue
        if workload.model != model:
            pipe = None
            free()
            model, pipe = workload.model, pipelines.random_pipeline(workload.model, getattr(torch, dtype))
        steps = TINY_STEPS if tiny else workload.steps
        yield {"workload": name, "dtype": dtype, "steps": steps} | Comparison(
            workload, pipe, steps, end, ways
        ).results()
        free()


class Comparison:
    """Measures one workload in each way."""

    def __init__(
        self,
        workload: Workload,
        pipe: Any,
        steps: int,
        end: float,
        builders: Mapping[str, Callable[[Any], Any]] = WAYS,
    ):
        self.workload, self.pipe, self.steps, self.end, self.builders = workload, pipe, steps, end, builders
        self.size = pipe.unet.config.sample_size * pipe.vae_scale_factor
        self.few = max(2, steps // SHORT)
        self.needed = workload.compiling + workload.measuring
        self.ways: dict[str, Any] = {}
        self.found: dict[str, Any] = {}
        self.calls = 0

    def results(self) -> dict[str, Any]:
        """Return the row. A way that fails has its `failure`, and a row without the same picture has no times."""
        expected = None
        for who in self.builders:
            if who == "compile" and time.monotonic() + self.needed > self.end:
                self.found["compile_failure"] = "no time"
                continue
            try:
                latents = self.begin(who)
            except Exception as error:
                self.ways.pop(who, None)
                self.found[f"{who}_failure"] = f"{type(error).__name__}: {str(error)[:200]}"
                free()
                continue
            if expected is None:
                expected = latents
            else:
                self.found[f"{who}_err"] = difference(latents, expected)
        if not self.found.get("fastdiff_err", 1.0) <= MOST:
            return {"failure": "fastdiff does not draw diffusers' picture"} | self.found
        return self.turns() | self.found

    def begin(self, who: str) -> Tensor:
        """Build a way and measure it alone. Return the latents of a whole call."""
        before = reserved_bytes() if GPU else 0
        pipes = self.ways[who] = self.builders[who](self.pipe)
        self.found[f"{who}_first_s"] = seconds(lambda: self.call(who, self.few))
        if GPU:
            self.found[f"{who}_peak_bytes"] = held_bytes(lambda: self.call(who, self.few)) - before
        else:
            self.call(who, self.few)
        self.call(who, self.steps)
        latents = self.draw(pipes, PROMPT, self.steps, output_type="latent").float().cpu()
        print(f"{who}: begun in {self.found[f'{who}_first_s']:.1f} s", flush=True)
        return latents

    def turns(self) -> dict[str, Any]:
        """Return the times of the ways, which take turns and begin one after the other."""
        long: dict[str, list[float]] = {who: [] for who in self.ways}
        short: dict[str, list[float]] = {who: [] for who in self.ways}
        order = list(self.ways)
        for done in range(ROUNDS):
            if done >= FEWEST and time.monotonic() > self.end:
                break
            for who in order:
                long[who].append(seconds(lambda who=who: self.call(who, self.steps)))
                short[who].append(seconds(lambda who=who: self.call(who, self.few)))
            order.append(order.pop(0))
        times = {f"{who}_s": statistics.median(each) for who, each in long.items()}
        for who in self.ways:
            more = statistics.median(a - b for a, b in zip(long[who], short[who], strict=True))
            times[f"{who}_step_ms"] = 1e3 * more / (self.workload.run(self.steps) - self.workload.run(self.few))
        return times | {"rounds": len(long["fastdiff"]), "run": self.workload.run(self.steps)}

    def call(self, who: str, steps: int) -> None:
        """Draw pictures of a prompt that is in no cache."""
        self.calls += 1
        self.draw(self.ways[who], f"{PROMPT}, {self.calls}", steps)

    def draw(self, pipes: Any, prompt: str, steps: int, **options: str) -> Any:
        draw = self.workload.theirs if isinstance(pipes, Theirs) else self.workload.ours
        generator = torch.Generator().manual_seed(0)
        prompts = [prompt] * self.workload.pictures
        given = {"prompt": prompts, "num_inference_steps": steps, "generator": generator, "guidance_scale": 7.5}
        return draw(pipes, self.size, given | options)


def ours_image_to_image(pipe: Any, size: int, given: Mapping[str, Any]) -> Any:
    return pipe(**given, image=photographs(size), strength=0.6).images


def theirs_image_to_image(pipes: Theirs, size: int, given: Mapping[str, Any]) -> Any:
    return ours_image_to_image(pipes.image_to_image, size, given)


def ours_inpainting(pipe: Any, size: int, given: Mapping[str, Any]) -> Any:
    return pipe(**given, image=photographs(size)[0], mask_image=circle(size)).images


def theirs_inpainting(pipes: Theirs, size: int, given: Mapping[str, Any]) -> Any:
    return ours_inpainting(pipes.inpaint, size, given)


def ours_hires(pipe: Any, size: int, given: Mapping[str, Any]) -> Any:
    side = 3 * size // 2
    return pipe(**given, height=side, width=side, upscale=2, upscale_strength=0.5).images


def theirs_hires(pipes: Theirs, size: int, given: Mapping[str, Any]) -> Any:
    side = 3 * size // 2
    first = {name: value for name, value in given.items() if name != "output_type"}
    images = pipes.text_to_image(**first, height=side, width=side).images
    larger = [image.resize((2 * side, 2 * side), Image.Resampling.LANCZOS) for image in images]
    return pipes.image_to_image(**given, image=larger, strength=0.5).images


def ours_prompt_to_png(pipe: Any, size: int, given: Mapping[str, Any]) -> Any:
    images = pipe(**given).images
    if "output_type" not in given:
        for image in images:
            image.save(io.BytesIO(), "PNG")
    return images


def theirs_prompt_to_png(pipes: Theirs, size: int, given: Mapping[str, Any]) -> Any:
    return ours_prompt_to_png(pipes.text_to_image, size, given)


WORKLOADS = {
    "sd15-image-to-image-b4": Workload(
        "sd15", 50, ours_image_to_image, theirs_image_to_image, lambda steps: int(steps * 0.6), 60, 80, pictures=4
    ),
    "sd15-prompt-to-png": Workload("sd15", 20, ours_prompt_to_png, theirs_prompt_to_png, lambda steps: steps, 40, 80),
    "sdxl-inpainting": Workload(
        "sdxl-inpainting", 50, ours_inpainting, theirs_inpainting, lambda steps: int(steps * 0.9999), 90, 130
    ),
    "sd15-hires-1536": Workload("sd15", 50, ours_hires, theirs_hires, lambda steps: steps + int(steps * 0.5), 110, 240),
}
_PICTURES: dict[int, list[Image.Image]] = {}


def photographs(size: int) -> list[Image.Image]:
    """Return four pictures, the same in every call."""
    if size not in _PICTURES:
        _PICTURES[size] = [photograph(size, 1.5, seed) for seed in range(4)]
    return _PICTURES[size]


def circle(size: int) -> Image.Image:
    """Return a mask: a white circle of half the width."""
    mask = Image.new("L", (size, size))
    ImageDraw.Draw(mask).ellipse((size // 4, size // 4, 3 * size // 4, 3 * size // 4), fill=255)
    return mask


def difference(latents: Tensor, expected: Tensor) -> float:
    """Return the RMS difference over the deviation of the expected; NaN if one has NaN."""
    return ((latents - expected).square().mean().sqrt() / expected.std()).item()


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call whose result is on the CPU."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def free() -> None:
    """Let torch give back the GPU memory of what is gone, also of compiled models."""
    torch.compiler.reset()
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
