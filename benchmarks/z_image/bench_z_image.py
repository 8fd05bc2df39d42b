"""Z-Image-Turbo at 1024x1024 with random weights of its true sizes, in bfloat16 and in 8 bits, against diffusers.

    python benchmarks/z_image/bench_z_image.py [WORKLOAD ...] [--tiny] [--save [DIR]]

    step       a step of the loop, in milliseconds: (18 steps - 9 steps) / 9. `floor_ms` is its products and attention
               at the measured rate of bfloat16 products. `fp8_err` is the RMS of the difference of a prediction from
               bfloat16's over the RMS; `fp8_psnr` is of pictures of nine steps, in dB
    png        seconds from a new prompt to a PNG, with nine steps: the median of five. `latents_s` ends before the VAE
    eager      a forward of diffusers' model, beside our forward of the same arguments
    compile    the same under torch.compile
    first      seconds from the start of `fastdiff sample` to its first PNG: with an empty cache of Triton, and again
    warmed     the same with a cache that `fastdiff warm` filled, in a process that sees no GPU
    int8       a process with 8-bit weights, where torch may allocate LIMIT bytes: the peak that it reserved

`first`, `warmed` and `int8` write a folder of 21 GB into the folder of temporary files, which TMPDIR names. `--tiny`
takes tiny models, to try the benchmark on any machine; its times say nothing.
"""

import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from benchmarks.harness.operations import ceilings
from benchmarks.harness.reports import PARSER, chosen, command_line, environment, needs_gpu, report
from benchmarks.pictures.bench_first_picture import run
from benchmarks.z_image.parts import DTYPE, FULL, TINY, Parts
from fastdiff import ZImagePipeline
from fastdiff.models.z_image import rounded_up
from fastdiff.requests.png_pixels import encode_pixels
from fastdiff.tuning.timing import DEVICE, measure
from fastdiff.verification.peers import compile_diffusers, error_of

STEPS, TOKENS = 9, 60  # TOKENS: of a given caption
LIMIT = 14 * 10**9  # bytes of GPU memory for int8
PRECISIONS = {"bf16": "full", "fp8": "fp8"}
PROMPT = "an astronaut rides a horse, {}"
Row = dict[str, Any]


def main() -> None:
    PARSER.add_argument("--tiny", action="store_true", help="tiny models, to try the benchmark")
    if not command_line().tiny:
        needs_gpu()
    torch.backends.cudnn.benchmark = True
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bench = Bench(Path(folder))
        names = chosen(WORKLOADS)
        report("z_image", ({"workload": name} | WORKLOADS[name](bench) for name in names), by=("workload", "triton"))


class Bench:
    """Holds what the workloads share."""

    def __init__(self, root: Path):
        """root: an empty folder."""
        self.root, self.tiny = root, command_line().tiny
        self.parts = Parts(TINY if self.tiny else FULL, root / "tokenizer")
        self.side = self.parts.sizes.side
        generator = torch.Generator(DEVICE).manual_seed(1)
        draw = partial(torch.randn, generator=generator, device=DEVICE, dtype=DTYPE)
        self.caption = draw(TOKENS, self.parts.sizes.transformer.get("cap_feat_dim", 2560))
        self.latents = draw(16, 1, self.side // 8, self.side // 8)

    @cached_property
    def folder(self) -> Path:
        """The pipeline's folder, whose files are in the page cache."""
        self.parts.pipeline().save_pretrained(self.root / "model")
        return self.root / "model"

    def draw(self, pipe: ZImagePipeline, *, steps: int = STEPS, prompt: str | None = None, output: str = "pil") -> Any:
        """Return the pictures of a call. prompt: None for the given caption."""
        what: Row = {"prompt_embeds": [self.caption]} if prompt is None else {"prompt": prompt}
        size: Row = {"height": self.side, "width": self.side}
        return pipe(**what, **size, num_inference_steps=steps, guidance_scale=0.0, seed=0, output_type=output).images

    def sample(self, cache: str) -> tuple[float, int]:
        """Draw a picture by the command, in a process with a cache of Triton; see `bench_first_picture.run`."""
        command = ["sample", "--model", self.folder, "--prompt", "a cat", "--steps", STEPS, "--cfg-scale", 0]
        command += ["--height", self.side, "--width", self.side, "--overwrite", "-o", self.root / "out.png"]
        free()
        return run(command, self.root / cache)

    @torch.inference_mode()
    def predict(self, model: Any) -> Tensor:
        """Return the prediction of our model or of diffusers' at half the time."""
        return model([self.latents], torch.tensor([0.5], device=DEVICE), [self.caption]).sample[0]

    def pipelines(self) -> Iterator[tuple[str, ZImagePipeline]]:
        """Yield the pipelines one after the other, each alone on the GPU with the random weights."""
        for name, precision in PRECISIONS.items():
            if precision == "full" or DEVICE.type == "cuda":
                yield name, self.parts.pipeline(precision)
                free()


def free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds until the result of a call is on the host."""
    wait = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def step(bench: Bench) -> Row:
    row: Row = {}
    made: dict[str, tuple[Tensor, Tensor]] = {}
    for name, pipe in bench.pipelines():
        latents = {n: partial(bench.draw, pipe, steps=n, output="latent") for n in (STEPS, 2 * STEPS)}
        for call in (*latents.values(), *latents.values()):  # run and captured
            call()
        least = {n: min(seconds_of(call) for _ in range(3)) for n, call in latents.items()}
        row[f"{name}_ms"] = 1e3 * (least[2 * STEPS] - least[STEPS]) / STEPS
        print(f"{name}_ms: {row[f'{name}_ms']:.2f}", file=sys.stderr)
        picture = bench.draw(pipe, output="pt").float()
        made[name] = bench.predict(pipe.denoiser).float(), picture
        if not all(each.isfinite().all() for each in made[name]):
            raise ArithmeticError(f"{name}: NaN or infinity in the prediction or the picture")
        del pipe
    if "fp8" in made:
        (exact, whole), (rounded, other) = made["bf16"], made["fp8"]
        row["fp8_err"] = ((rounded - exact).square().mean() / exact.square().mean()).sqrt().item()
        row["fp8_psnr"] = -10 * math.log10((whole - other).square().mean().item())
    if DEVICE.type == "cuda":
        row["floor_ms"] = operations(bench) / ceilings()["matmul_bf16_tflops"] / 1e9
    return row


def operations(bench: Bench) -> float:
    """Return the floating point operations of a step, with attention."""
    picture, caption = (bench.side // 16) ** 2, rounded_up(TOKENS)
    config = {"dim": 3840, "n_layers": 30, "n_refiner_layers": 2} | bench.parts.sizes.transformer
    dim, layers = config["dim"], {picture + caption: config["n_layers"], picture: config["n_refiner_layers"]}
    weights = 4 * dim**2 + 3 * dim * int(dim / 3 * 8)
    return sum(count * (2 * tokens * weights + 4 * tokens**2 * dim) for tokens, count in layers.items())


def peer(bench: Bench, *, compiled: bool) -> Row:
    ours = next(bench.pipelines())[1].denoiser
    with torch.device("meta"):
        theirs = diffusers.ZImageTransformer2DModel(**bench.parts.sizes.transformer).eval()
    theirs.load_state_dict(bench.parts.transformer, assign=True)
    model = compile_diffusers(theirs) if compiled else theirs
    row: Row = {"first_s": seconds_of(lambda: bench.predict(model))}
    print(f"first call: {row['first_s']:.1f} s", file=sys.stderr)
    calls = {"fastdiff": lambda: bench.predict(ours), "peer": lambda: bench.predict(model)}
    row |= {f"{who}_ms": value for who, value in measure(calls, graph=False, seconds=0.3).items()}
    return row | {"difference": error_of(bench.predict(ours), bench.predict(theirs).float())}


def png(bench: Bench) -> Row:
    row: Row = {}
    for name, pipe in bench.pipelines():
        numbers = iter(range(10, 99))  # texts of one length, each encoded anew

        def picture(pipe: ZImagePipeline = pipe, numbers: Iterator[int] = numbers) -> bytes:
            return encode_pixels(bench.draw(pipe, prompt=PROMPT.format(next(numbers)))[0])

        def latents(pipe: ZImagePipeline = pipe, numbers: Iterator[int] = numbers) -> Tensor:
            return bench.draw(pipe, prompt=PROMPT.format(next(numbers)), output="latent")

        for call in (picture, picture, picture, latents):
            call()
        row[f"{name}_s"] = statistics.median(seconds_of(picture) for _ in range(5))
        row[f"{name}_latents_s"] = statistics.median(seconds_of(latents) for _ in range(3))
        print(f"{name}_s: {row[f'{name}_s']:.3f}", file=sys.stderr)
        del pipe, picture, latents
    return row


def first(bench: Bench) -> Row:
    row: Row = {}
    for what in ("cold", "again"):
        row[what], row[f"compiled_{what}"] = bench.sample("cold")
        print(f"{what}: {row[what]:.1f} s", file=sys.stderr)
    return row


def warmed(bench: Bench) -> Row:
    major, minor = torch.cuda.get_device_capability(DEVICE)
    size = f"{bench.side}x{bench.side}"
    card = ["warm", "--model", bench.folder, "--card", f"sm_{major}{minor}", "--cfg-scale", 0, "--size", size]
    seconds, _ = run(card, bench.root / "warmed", CUDA_VISIBLE_DEVICES="")
    print(f"warm: {seconds:.1f} s", file=sys.stderr)
    times, compiled = zip(*(bench.sample("warmed") for _ in range(2)), strict=True)
    return {"warm": seconds, "warmed": min(times), "compiled_warmed": compiled[0]}


def int8(bench: Bench) -> Row:
    command: list[Any] = [
        sys.executable,
        Path(__file__).with_name("limited.py"),
        bench.folder,
        bench.side,
        STEPS,
        LIMIT,
    ]
    free()
    said = subprocess.run([*map(str, command)], env=environment(), stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


WORKLOADS: dict[str, Callable[[Bench], Row]] = {
    "step": step,
    "png": png,
    "eager": partial(peer, compiled=False),
    "compile": partial(peer, compiled=True),
    "first": first,
    "warmed": warmed,
    "int8": int8,
}

if __name__ == "__main__":
    main()
