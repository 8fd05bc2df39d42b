"""The doors that a case goes through: the command, the library, the page's API. Each says what it broke.

An outcome is what came out of a door: a picture or an answer ("done"), a refusal, and the promises that were broken.
"""

import asyncio
import contextlib
import copy
import functools
import io
import json
import os
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import gradio as gr
import numpy as np
import torch
from PIL import Image

import fastdiff
from fastdiff import cli
from fastdiff.checkpoints.configs.dit import DiTTransformer2DConfig
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import read_denoiser_part
from fastdiff.cli.streams import MAX_MESSAGE
from fastdiff.diffusion.trajectories import TrajectoryOutput
from fastdiff.errors import InputError, NonFiniteError
from fastdiff.models.classes import DENOISERS
from fastdiff.requests import png
from fastdiff.runs import plot
from fastdiff.ui.api import add_api
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models
from fastdiff.ui.tabs.upload import read_record
from tests.fuzz.edits import PNG_NAME
from tests.fuzz.folders import MODELS, SCHEDULER
from tests.fuzz.values import OBJECTS, WORDS

REFUSALS = (InputError, NonFiniteError)
# Python's own, when an argument has no such name
_UNBOUND = re.compile(r"unexpected keyword argument|missing \d+ required|multiple values|keywords must be strings")
_BAR = re.compile(r"(pictures|trajectories) \[|trajectories/s")
NOT_WITHIN = "NOT within tolerance"


@dataclass
class Outcome:
    """The end of a call through a door."""

    is_done: bool
    said: str = ""
    problems: list[str] = field(default_factory=list)


Options = tuple[tuple[str, str], ...]  # an argument and the name of its value, or a flag and its word
NO_VALUE = "(alone)"  # of a flag


def _guarded(run: Callable[..., str | list[str]]) -> Callable[..., Outcome]:
    """Turn what a door's function raises into an outcome; it returns the promises that were broken."""

    @functools.wraps(run)
    def door(*args: Any) -> Outcome:
        try:
            problems = run(*args)
        except REFUSALS as error:
            return Outcome(False, str(error), ["a refusal of several lines"] if "\n" in str(error) else [])
        except Exception as error:
            if isinstance(error, TypeError) and _UNBOUND.search(str(error)):
                return Outcome(False, str(error))
            return Outcome(False, str(error), [_traceback(error)])
        return Outcome(True, "", list(problems))

    return door


def _traceback(error: BaseException) -> str:
    """One line: the kind of an error, and the place in our code that it came through last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "fastdiff" in frame.filename and "fuzz" not in Path(frame.filename).parts]
    place = f"{'/'.join(Path(ours[-1].filename).parts[-2:])}:{ours[-1].name}" if ours else "the door itself"
    return f"raised {type(error).__name__} in {place}: {' '.join(str(error).split())[:160]}"


# -- the command --


def command(folder: Path, what: str, options: Options) -> Outcome:
    """`fastdiff WHAT`, in this process."""
    argv = COMMANDS[what](folder)
    for name, value in options:
        word = WORDS.get(value, value)
        argv += [word] if name == "" else [name] if value == NO_VALUE else [f"{name}={word}"]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _in_folder(folder.parent / "out"):
            code = cli.main(argv)
    except Exception as error:
        return Outcome(False, "", [_traceback(error)])
    said = [line for line in re.split(r"[\r\n]+", err.getvalue()) if line.strip() and not _BAR.search(line)]
    problems = _check_lines(code, said, out.getvalue())
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
    ],
    "from": lambda folder: ["sample", "--from", str(folder / PNG_NAME), "-m", str(folder), "--steps", "1", "--json"],
    "info": lambda folder: ["info", str(folder / PNG_NAME)],
    "models": lambda folder: ["models", str(folder)],
    "verify": lambda folder: ["verify", str(folder), "--steps", "2", "--device", "cpu"],
    "explain": lambda folder: ["sample", "-m", str(folder), "--explain", "--steps", "1", "--device", "cpu"],
}


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
    """Every file that a line of --json names is whole: a picture of the model's size, or a plot and its trajectory."""
    card, out = ModelCard.read("model", folder), folder.parent / "out"
    problems: list[str] = []
    size = (plot.WIDTH, plot.HEIGHT) if card.config.of_trajectories else card.size
    for line in map(json.loads, printed.splitlines()):
        path = out / line["path"]
        if card.config.of_trajectories:
            planned = np.load(out / line["trajectory"])[None]
            problems += _check_plan(card.config, TrajectoryOutput(planned), line["settings"])
        with Image.open(path) as image:
            image.load()
        if size not in (None, image.size):
            problems.append(f"a picture of {image.size} for {size}")
        png.read_settings(path)
    return problems if printed.strip() else ["exit code 0 without a picture"]


# -- the library --


def library(folder: Path, what: str, options: Options) -> Outcome:
    """A call of the library; the values are made anew."""
    return LIBRARY[what](folder, {name: OBJECTS[value]() for name, value in options})


def _draw(pipe: Any, options: dict[str, Any]) -> list[str]:
    output = pipe(**{"num_inference_steps": 1, "num_images": 1, "seed": 3, "output_type": "np"} | options)
    if pipe.plans_trajectories:
        return _check_plan(pipe.denoiser.config, output, options)
    images = output.images
    if isinstance(images, list):  # of PIL
        return []
    values = images.numpy() if isinstance(images, torch.Tensor) else np.asarray(images)
    if not np.isfinite(values).all():
        return ["a picture that is not finite"]
    sides = values.shape[2:] if isinstance(images, torch.Tensor) else values.shape[1:3]
    trained = pipe.denoiser.config.trained_size or sides
    asked = [options.get(name) for name in ("height", "width")]
    expected = [trained[i] * pipe.scale if asked[i] is None else asked[i] for i in range(2)]
    fits = "latents" in options or list(sides) == expected
    return [] if fits else [f"a picture of {tuple(sides)} for {expected}"]


def _check_plan(config: Any, output: TrajectoryOutput, options: dict[str, Any]) -> list[str]:
    """Trajectories are finite, of the horizon asked for, as the conditions say, and the best of them is the first."""
    planned, problems = np.asarray(output.trajectories), []
    if not np.isfinite(planned).all():
        problems.append("a trajectory that is not finite")
    horizon = config.sample_size if options.get("horizon") is None else options["horizon"]
    if "latents" not in options and planned.shape[1:] != (config.sample_channels, horizon):
        problems.append(f"trajectories of {planned.shape} for horizon {horizon}")
    for position, values in (options.get("conditions") or {}).items():
        known = torch.as_tensor(values).detach().float().numpy()
        if known.ndim == 1 and not (planned[:, -len(known) :, position] == known).all():
            problems.append(f"a trajectory without its condition at {position}")
    if output.values is not None and (np.diff(np.asarray(output.values)) > 0).any():
        problems.append("a better trajectory behind a worse one")
    return problems


@_guarded
def _pipeline(folder: Path, options: dict[str, Any]) -> list[str]:
    return _draw(fastdiff.Pipeline.from_pretrained(folder, device="cpu"), options)


@_guarded
def _load(folder: Path, options: dict[str, Any]) -> list[str]:
    return _draw(fastdiff.Pipeline.from_pretrained(**{"name_or_path": folder, "device": "cpu"} | options), {})


def _denoiser_folder(folder: Path) -> tuple[Any, Path]:
    """The class of the folder's denoiser, which its place says where its config says none, and its folder."""
    kinds = [kind for kind in DENOISERS.values() if (folder / kind.part.name).is_dir()]
    place = folder / kinds[0].part.name if kinds else folder
    with contextlib.suppress(InputError):
        kinds.insert(0, DENOISERS[read_denoiser_part(place / "config.json").class_name])
    return (kinds or [fastdiff.UNet2DModel])[0], place


@_guarded
def _load_model(folder: Path, options: dict[str, Any]) -> list[str]:
    kind, _ = _denoiser_folder(folder)
    return _call(kind.from_pretrained(**{"name_or_path": folder} | options), {})


@_guarded
def _call_model(folder: Path, options: dict[str, Any]) -> list[str]:
    kind, place = _denoiser_folder(folder)
    return _call(kind.from_pretrained(place), options)


def _call(model: Any, options: dict[str, Any]) -> list[str]:
    output = model(**_arguments(model.config, model.dtype, options))
    sample = output[0] if isinstance(output, tuple) else output.sample
    return [] if "sample" in options or bool(sample.isfinite().all()) else ["an output that is not finite"]


def _arguments(config: Any, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """A sound call of a model, but for `options`, where `sample` is its first argument whatever its class calls it."""
    given: dict[str, Any] = {"timestep": torch.tensor(1)}
    if config.takes_labels:
        is_index = config.label_table is not None or config.num_timestep_embeds is not None
        given["class_labels"] = torch.zeros(2, *config.label_shape, dtype=torch.int64 if is_index else torch.float32)
    size = (config.trained_size or (8, 8))[-len(config.AXES) :]
    given |= {"sample": torch.zeros(2, config.sample_channels, *size, dtype=dtype)} | options
    if isinstance(config, DiTTransformer2DConfig):
        given["hidden_states"] = given.pop("sample")
    return given


@_guarded
def _config(folder: Path, options: dict[str, Any]) -> list[str]:
    kind, place = _denoiser_folder(folder)
    return _call(kind.from_config(_with_options(place / "config.json", options)), {})


def _with_options(path: Path, options: dict[str, Any]) -> Any:
    """The content of a JSON file as a program would read it, with options that it adds."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else SCHEDULER
    except (ValueError, RecursionError):
        raise InputError(f"{path}: no program could read it") from None
    if content == {}:
        raise InputError(f"{path}: no options, which would be diffusers' own large model")
    return content | options if isinstance(content, dict) else content


@_guarded
def _scheduler(folder: Path, options: dict[str, Any]) -> list[str]:
    steps = {name: options.pop(name) for name in ("num_inference_steps", "device") if name in options}
    step = {name: options.pop(name) for name in STEP if name in options}
    config = _with_options(folder / "scheduler" / "scheduler_config.json", options)
    is_ddpm = isinstance(config, dict) and config.get("_class_name") == "DDPMScheduler"
    if is_ddpm and config.get("variance_type") == "learned_range":
        config["variance_type"] = "fixed_small"  # the step's output has no variance
    scheduler = (fastdiff.DDPMScheduler if is_ddpm else fastdiff.DDIMScheduler).from_config(config)
    x = torch.zeros(2, 3, 8, 8)
    scheduler.set_timesteps(**{"num_inference_steps": 2} | steps)
    given = {"model_output": x, "timestep": int(scheduler.timesteps[0]), "sample": x}
    given |= {"generator": torch.Generator().manual_seed(0)} if is_ddpm else {}
    scheduler.step(**given | step)
    return []


STEP = ("model_output", "timestep", "sample", "eta", "generator", "return_dict", "use_clipped_model_output")
STEP += ("variance_noise",)


@functools.cache
def _theirs(class_name: str) -> Any:
    """A model of diffusers."""
    options = {name: each for name, each in MODELS[class_name].items() if not name.startswith("_")}
    return getattr(diffusers, class_name).from_config(options)


@_guarded
def _accelerate(folder: Path, options: dict[str, Any]) -> list[str]:
    if "model" in options:
        fastdiff.accelerate(options["model"])
        return ["accelerate took what is no model"]
    kind, _ = _denoiser_folder(folder)
    model = copy.deepcopy(_theirs(kind.__name__))
    config = kind.part.config.from_mapping(model.config, "config")
    fastdiff.accelerate(model)
    try:
        model(**_arguments(config, torch.float32, options))
    finally:
        fastdiff.restore(model)
    return []


LIBRARY: dict[str, Callable[[Path, dict[str, Any]], Outcome]] = {
    "pipeline": _pipeline,
    "load": _load,
    "model": _call_model,
    "load model": _load_model,
    "config": _config,
    "scheduler": _scheduler,
    "accelerate": _accelerate,
}


# -- the page --


@functools.cache
def _functions() -> tuple[Models, Callable[..., Any], Callable[[], Any]]:
    """The models that the page offers, and the functions of its API over them."""
    models = Models(device="cpu")

    async def build() -> gr.Blocks:  # outside of an event loop Gradio makes some and closes none
        with gr.Blocks() as page:
            add_api(models, Limits(pictures=4, steps=20, side=64, batch_size=4))
        return page

    generate, list_models = (each.fn for each in asyncio.run(build()).fns.values())
    return models, generate, list_models


def page(folder: Path, what: str, options: Options) -> Outcome:
    """A call of the page's API, or a PNG that is dropped on it."""
    os.environ["GRADIO_TEMP_DIR"] = str(folder.parent / "out")
    try:
        return PAGE[what](folder, {name: OBJECTS[value]() for name, value in options})
    finally:
        del os.environ["GRADIO_TEMP_DIR"]


@_guarded
def _api(folder: Path, options: dict[str, Any]) -> list[str]:
    models, generate, _ = _functions()
    models.__init__(folder.parent, device="cpu")  # type: ignore[misc]  # nothing is loaded, and this is its folder
    try:
        *_, files = generate(**{"model": f"./{folder.name}", "num_images": 1, "steps": 1} | options)
    except gr.Error as error:
        raise InputError(str(error.message)) from None
    for file in files:
        with Image.open(file["path"]) as image:
            image.load()
        png.read_settings(file["path"])
    return []


@_guarded
def _list(folder: Path, options: dict[str, Any]) -> list[str]:
    models, _, list_models = _functions()
    models.__init__(folder.parent, device="cpu")  # type: ignore[misc]
    found = json.loads(json.dumps(list_models()))
    return [] if "emoji64" in [each["name"] for each in found] else ["one bad folder took down the list"]


@_guarded
def _upload(folder: Path, options: dict[str, Any]) -> list[str]:
    record = read_record(folder / PNG_NAME, Limits())
    return [] if type(record["seed"]) is int else ["a seed that is no number"]


PAGE: dict[str, Callable[[Path, dict[str, Any]], Outcome]] = {"generate": _api, "models": _list, "upload": _upload}


def warm_up(folder: Path) -> None:
    """Import and build what the doors build once: it reads and writes more than a case may."""
    os.environ["GRADIO_TEMP_DIR"] = str(folder.parent / "out")
    _functions()
    any(map(_theirs, DENOISERS))
    for what in ("verify", "explain"):
        command(folder, what, ())
    library(folder, "pipeline", ())
    page(folder, "generate", ())


DOORS: dict[str, Callable[[Path, str, Options], Outcome]] = {"command": command, "library": library, "page": page}
