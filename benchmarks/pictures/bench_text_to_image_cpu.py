"""A guided picture of a small text model on the CPU, whole and by part, against diffusers with the same weights.

    python benchmarks/pictures/bench_text_to_image_cpu.py [MODEL ...] [--save [DIR]]

A MODEL is a bundled model that draws from prompts (default: all of them) or a folder of StableDiffusionPipeline; random
weights are enough for the times. Everything is float32. The sampler is the folder's own. Times are medians in
milliseconds; calls of ours and of diffusers alternate, and so does which of a pair goes first:

    picture    from the prompt to a PIL image in STEPS steps
    text       encoding the prompt and the empty prompt
    forward    the U-Net on both halves of a guided batch of one picture
    decode     the VAE
    command    from the start of a process to its PNG: `fastdiff sample`, and a script with diffusers' pipeline
    *_ratio    ours / theirs, the median of the pairs

`image_err` is the largest difference between the pictures of the same noise, in [0, 1]. diffusers keeps the memory
format that it loads with: none was faster on the CPU. torch uses its default number of threads, or OMP_NUM_THREADS.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

import fastdiff
from benchmarks.harness.reports import command_line, report
from fastdiff.checkpoints.hub import bundled_models
from fastdiff.checkpoints.json_files import read_json

PROMPT, STEPS, GUIDANCE = "red apple", 30, 5.0  # the defaults of emoji-sd
ROUNDS, PROCESSES = 24, 5  # pairs of calls, pairs of processes
DRAW = """
import sys, torch, diffusers
folder, prompt, steps, guidance, out = sys.argv[1:]
pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
pipe(prompt, num_inference_steps=int(steps), guidance_scale=float(guidance)).images[0].save(out)
"""


class Pair(NamedTuple):
    """The same work in fastdiff and in diffusers."""

    ours: Callable[[], Any]
    theirs: Callable[[], Any]


def main() -> None:
    folders = {name: Path(bundled_models().get(name, name)) for name in command_line().workload or text_models()}
    report("text_to_image_cpu", (row(name, folder) for name, folder in folders.items()))


def text_models() -> list[str]:
    """Return the names of the bundled models that draw from prompts."""
    folders = bundled_models().items()
    return [name for name, folder in folders if "text_encoder" in read_json(folder / "model_index.json")]


def row(name: str, folder: Path) -> dict[str, Any]:
    """Return the times and the error of a model."""
    ours = fastdiff.Pipeline.from_pretrained(folder, device="cpu")
    ours.encoders.remember(0)  # both encode the text in every call
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    numbers: dict[str, Any] = {"workload": name, "threads": torch.get_num_threads()}
    for part, pair in parts(ours, theirs).items():
        numbers |= in_turn(part, pair, ROUNDS)
    with tempfile.TemporaryDirectory() as out:
        numbers |= in_turn("command", processes(folder, Path(out)), PROCESSES)
    return numbers | {"image_err": image_err(ours, theirs)}


def parts(ours: Any, theirs: Any) -> Mapping[str, Pair]:
    """Return the calls that are timed in this process: a whole picture and its parts."""
    config = ours.denoiser.config
    side, timestep = config.sample_size, torch.tensor(500)
    x = torch.randn(2, config.in_channels, side, side)
    text = torch.randn(2, ours.encoders.tokenizers[0].length, config.text_width)
    draw = partial(options, output_type="pil")
    calls = {
        "picture": Pair(lambda: ours(**draw()), lambda: theirs(**draw())),
        "text": Pair(
            lambda: [ours.encoders.encode([prompt]) for prompt in (PROMPT, "")],
            lambda: theirs.encode_prompt(PROMPT, torch.device("cpu"), 1, True),
        ),
        "forward": Pair(lambda: ours.denoiser(x, timestep, text), lambda: theirs.unet(x, timestep, text)),
        "decode": Pair(lambda: ours.vae.decode(x[:1]), lambda: theirs.vae.decode(x[:1])),
    }
    return {name: Pair(*map(torch.no_grad(), pair)) for name, pair in calls.items()}


def options(**more: Any) -> dict[str, Any]:
    """Return the arguments of either pipeline for one picture."""
    generator = torch.Generator().manual_seed(0)
    return {"prompt": PROMPT, "num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "generator": generator} | more


def processes(folder: Path, out: Path) -> Pair:
    """Return a `fastdiff sample` process that draws a picture, and a script that does the same with diffusers."""
    drawn = [PROMPT, str(STEPS), str(GUIDANCE)]
    names = ["--prompt", "--steps", "--guidance"]
    flags = [word for pair in zip(names, drawn, strict=True) for word in pair]
    flags += ["--overwrite", "--device", "cpu", "--out", str(out / "ours")]
    ours = ["-m", "fastdiff", "sample", "--model", folder, *flags]
    theirs = ["-c", DRAW, folder, *drawn, out / "theirs.png"]
    return Pair(*(partial(run, [sys.executable, *map(str, command)]) for command in (ours, theirs)))


def run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True)


def in_turn(name: str, pair: Pair, rounds: int) -> dict[str, float]:
    """Time a pair of calls in alternation after one warm-up each; return the median times and the median ratio."""
    for call in pair:
        call()
    ours, theirs = [], []
    for i in range(rounds):
        turns = [(ours, pair.ours), (theirs, pair.theirs)]
        for times, call in turns if i % 2 else reversed(turns):
            times.append(seconds_of(call))
    return {
        f"{name}_ms": 1e3 * statistics.median(ours),
        f"{name}_diffusers_ms": 1e3 * statistics.median(theirs),
        f"{name}_ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def image_err(ours: Any, theirs: Any) -> float:
    """Return the largest difference between the two pictures of the same noise."""
    pictures = [torch.as_tensor(pipe(**options(output_type="np")).images) for pipe in (ours, theirs)]
    return (pictures[0] - pictures[1]).abs().max().item()


if __name__ == "__main__":
    main()
