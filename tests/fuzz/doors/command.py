"""The command as a door: `fastdiff WHAT` in this process, with checks of its output and files."""

import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from fastdiff import cli
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.cli.streams import MAX_MESSAGE
from fastdiff.diffusion.trajectories import TrajectoryOutput
from fastdiff.requests import png
from fastdiff.runs import plot
from tests.fuzz.doors.library import check_plan
from tests.fuzz.doors.outcomes import Options, Outcome, said_of
from tests.fuzz.edits import PNG_NAME
from tests.fuzz.named.hostile_files import FILE_NAME
from tests.fuzz.named.loras import NAME as LORA_NAME
from tests.fuzz.values import PROMPT, WORDS

_PROGRESS = re.compile(r"fastdiff: (drawing \d+ |.* (pictures|trajectories)/s)")
NOT_WITHIN = "NOT within tolerance"
NO_VALUE = "(alone)"  # a flag without a value


def call(folder: Path, what: str, options: Options) -> Outcome:
    """Run `fastdiff WHAT` in this process."""
    argv = COMMANDS[what](folder)
    for name, value in options:
        word = WORDS.get(value, value)
        argv += [word] if name == "" else [name] if value == NO_VALUE else [f"{name}={word}"]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _in_folder(folder.parent / "out"):
            code = cli.main(argv)
    except Exception as error:
        return Outcome(False, "", [said_of(error)])
    said = [line for line in re.split(r"[\r\n]+", err.getvalue()) if line.strip() and not _PROGRESS.match(line)]
    problems = _check_lines(code, said, out.getvalue())
    problems += ["exit code 1 for a file"] if code == 1 and what.endswith(" file") else []
    if code == 0 and what == "sample":
        problems += _check_files(folder, out.getvalue())
    return Outcome(code == 0, " ".join(said), problems)


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "sample": lambda folder: [
        *("sample", "-m", str(folder), "--device", "cpu", "--steps", "1", "--num-images", "1", "--json"),
        *_prompt(folder),
    ],
    "from": lambda folder: ["sample", "--from", str(folder / PNG_NAME), "-m", str(folder), "--steps", "1", "--json"],
    "info": lambda folder: ["info", str(folder / PNG_NAME)],
    "sample file": lambda folder: [
        *("sample", "-m", str(folder / FILE_NAME), "--config", str(folder), "--device", "cpu", "--dtype", "float32"),
        *("--steps", "1", "--num-images", "1", "--prompt", PROMPT),
    ],
    "info file": lambda folder: ["info", str(folder / FILE_NAME)],
    "info lora": lambda folder: ["info", str(folder / LORA_NAME)],
    "list loras": lambda folder: ["models", "--lora-dir", str(folder)],
    "models": lambda folder: ["models", str(folder)],
    "verify": lambda folder: ["verify", str(folder), "--steps", "2", "--device", "cpu"],
    "bench": lambda folder: ["bench", str(folder), "--steps", "1", "--no-compile", "--device", "cpu"],
    "explain": lambda folder: [
        *("sample", "-m", str(folder), "--explain", "--steps", "1", "--device", "cpu"),
        *_prompt(folder),
    ],
}


def _prompt(folder: Path) -> list[str]:
    """Return the prompt flag if the model needs one."""
    return ["--prompt", PROMPT] if (folder / "tokenizer").is_dir() else []


def _check_lines(code: int, said: list[str], printed: str) -> list[str]:
    if code not in (0, 1, 2):
        return [f"exit code {code}"]
    if code == 1 and NOT_WITHIN in printed:
        return [NOT_WITHIN]
    if code and len(said) != 1:
        return [f"{len(said)} lines on stderr with exit code {code}: {' | '.join(said)[:300]}"]
    if code and len(said[0].removeprefix("fastdiff: error: ")) > MAX_MESSAGE:
        return [f"a line of {len(said[0])} characters on stderr"]
    return []


def _check_files(folder: Path, printed: str) -> list[str]:
    """Check the files that the lines of --json name: pictures of the stated size, or plots and their trajectories."""
    card, out = ModelCard.read("model", folder), folder.parent / "out"
    problems: list[str] = []
    for line in map(json.loads, printed.splitlines()):
        path, settings = out / line["path"], line["settings"]
        size = settings["width"], settings["height"]
        if card.config.of_trajectories:
            planned = np.load(out / line["trajectory"])[None]
            problems += check_plan(card.config, TrajectoryOutput(planned), settings)
            problems += [] if size == (plot.WIDTH, plot.HEIGHT) else [f"a plot of {size}"]
        with Image.open(path) as image:
            image.load()
        if size != image.size:
            problems.append(f"a picture of {image.size} for {size}")
        png.read_settings(path)
    return problems if printed.strip() else ["exit code 0 without a picture"]
