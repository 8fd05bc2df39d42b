"""The library as a door: pipelines, models, schedulers and configs, called with odd arguments."""

import contextlib
import copy
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

import fastdiff
from fastdiff.checkpoints.configs.dit import DiTTransformer2DConfig
from fastdiff.checkpoints.registry import read_denoiser_part
from fastdiff.diffusion.trajectories import TrajectoryOutput
from fastdiff.errors import InputError
from fastdiff.models.classes import DENOISERS
from fastdiff.text.tokenizer import CLIPTokenizer
from tests.fuzz.doors.outcomes import REFUSALS, Options, Outcome, guarded
from tests.fuzz.folders import MODELS, SCHEDULER
from tests.fuzz.named import controls, embeddings, loras
from tests.fuzz.named.image_prompts import ip_adapters, live
from tests.fuzz.values import OBJECTS, PROMPT


def call(folder: Path, what: str, options: Options) -> Outcome:
    """Call the library with new objects for the named values. Calls in `OF_TEXTS` take the names themselves."""
    if what in OF_TEXTS:
        return OF_TEXTS[what](folder, dict(options))
    return LIBRARY[what](folder, {name: OBJECTS[value]() for name, value in options})


def _draw(pipe: Any, options: dict[str, Any]) -> list[str]:
    given = {"num_inference_steps": 1, "seed": 3, "output_type": "np"}
    if pipe.reads_text:
        given |= {} if "prompt_embeds" in options else {"prompt": PROMPT}
    else:
        given["num_images"] = 1
    output = pipe(**given | options)
    if isinstance(pipe, fastdiff.TrajectoryPipeline):
        return check_plan(pipe.denoiser.config, output, options)
    images = output.images
    if isinstance(images, list):  # PIL images
        return []
    values = images.numpy() if isinstance(images, torch.Tensor) else np.asarray(images)
    if not np.isfinite(values).all():
        return ["a picture that is not finite"]
    sides = values.shape[2:] if isinstance(images, torch.Tensor) else values.shape[1:3]
    trained = pipe.denoiser.config.trained_size or sides
    asked = [options.get(name) for name in ("height", "width")]
    expected = [trained[i] * pipe.scale if asked[i] is None else asked[i] for i in range(2)]
    fits = "latents" in options or options.get("output_type") == "latent" or list(sides) == expected
    return [] if fits else [f"a picture of {tuple(sides)} for {expected}"]


def check_plan(config: Any, output: TrajectoryOutput, options: dict[str, Any]) -> list[str]:
    """Check that trajectories are finite, have the requested horizon and conditions, and are sorted by value."""
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


@guarded
def _pipeline(folder: Path, options: dict[str, Any]) -> list[str]:
    return _draw(fastdiff.Pipeline.from_pretrained(folder, device="cpu"), options)


@guarded
def _weighted(folder: Path, options: dict[str, Any]) -> list[str]:
    pipe = fastdiff.Pipeline.from_pretrained(folder, device="cpu")
    numbers = {name: int(options.pop(name)) for name in ("num_inference_steps", "guidance_scale")}
    return _draw(pipe, options | numbers | {"prompt_syntax": "weighted"})


@guarded
def _load(folder: Path, options: dict[str, Any]) -> list[str]:
    given = {"pretrained_model_name_or_path": folder, "device": "cpu"} | options
    return _draw(fastdiff.Pipeline.from_pretrained(**given), {})


def _denoiser_folder(folder: Path) -> tuple[Any, Path]:
    """Return the class of the folder's denoiser, by its config or else by its folder's name, and its folder."""
    kinds = [kind for kind in DENOISERS.values() if (folder / kind.part.name).is_dir()]
    place = folder / kinds[0].part.name if kinds else folder
    with contextlib.suppress(InputError):
        kinds.insert(0, DENOISERS[read_denoiser_part(place / "config.json").class_name])
    return (kinds or [fastdiff.UNet2DModel])[0], place


@guarded
def _load_model(folder: Path, options: dict[str, Any]) -> list[str]:
    kind, _ = _denoiser_folder(folder)
    return _call_of(kind.from_pretrained(**{"pretrained_model_name_or_path": folder} | options), {})


@guarded
def _load_parts(folder: Path, options: dict[str, Any]) -> list[str]:
    """Load every part except the denoiser alone, and run each text encoder on its tokenizer's output."""
    fastdiff.AutoencoderKL.from_pretrained(folder, subfolder="vae")
    for end, kind in (("", fastdiff.CLIPTextModel), ("_2", fastdiff.CLIPTextModelWithProjection)):
        if (folder / f"tokenizer{end}").is_dir():
            tokenizer = CLIPTokenizer(folder / f"tokenizer{end}")
            encoder = kind.from_pretrained(folder, subfolder=f"text_encoder{end}")
            encoder(torch.tensor([tokenizer(PROMPT).ids]))
    return []


@guarded
def _call_model(folder: Path, options: dict[str, Any]) -> list[str]:
    kind, place = _denoiser_folder(folder)
    return _call_of(kind.from_pretrained(place), options)


def _call_of(model: Any, options: dict[str, Any]) -> list[str]:
    output = model(**_arguments(model.config, model.dtype, options))
    sample = output[0] if isinstance(output, tuple) else output.sample
    # with weights such as 1e30 sums may overflow, in diffusers too
    may_overflow = "sample" in options or any(bool((each.abs() > 1e20).any()) for each in model.parameters())
    return [] if may_overflow or bool(sample.isfinite().all()) else ["an output that is not finite"]


def _arguments(config: Any, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """Return sound arguments for a model, overridden by `options`; `sample` is the first argument in every class."""
    given: dict[str, Any] = {"timestep": torch.tensor(1)}
    if config.takes_labels:
        is_index = config.label_table is not None or config.num_timestep_embeds is not None
        given["class_labels"] = torch.zeros(2, *config.label_shape, dtype=torch.int64 if is_index else torch.float32)
    told = {name: torch.zeros(2, *shape, dtype=dtype) for name, shape in config.prompt_shapes.items()}
    given |= {name: told.pop(name) for name in ("encoder_hidden_states",) if name in told}
    given |= {"added_cond_kwargs": told} if told else {}
    size = (config.trained_size or (8, 8))[-len(config.AXES) :]
    given |= {"sample": torch.zeros(2, config.sample_channels, *size, dtype=dtype)} | options
    if isinstance(config, DiTTransformer2DConfig):
        given["hidden_states"] = given.pop("sample")
    return given


@guarded
def _config(folder: Path, options: dict[str, Any]) -> list[str]:
    kind, place = _denoiser_folder(folder)
    return _call_of(kind.from_config(_with_options(place / "config.json", options)), {})


def _with_options(path: Path, options: dict[str, Any]) -> Any:
    """Read a JSON file as a program would, and add options."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else SCHEDULER
    except (ValueError, RecursionError):
        raise InputError(f"{path}: JSON that Python cannot read") from None
    if content == {}:
        raise InputError(f"{path}: no options, which would mean diffusers' large default model")
    return content | options if isinstance(content, dict) else content


@guarded
def _scheduler(folder: Path, options: dict[str, Any]) -> list[str]:
    steps = {name: options.pop(name) for name in ("num_inference_steps", "device") if name in options}
    step = {name: options.pop(name) for name in STEP if name in options}
    config = _with_options(folder / "scheduler" / "scheduler_config.json", options)
    is_ddpm = isinstance(config, dict) and config.get("_class_name") == "DDPMScheduler"
    if is_ddpm and config.get("variance_type") == "learned_range":
        config["variance_type"] = "fixed_small"  # the step's model output has no variance
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
def theirs(class_name: str) -> Any:
    """Return a tiny diffusers model."""
    options = {name: each for name, each in MODELS[class_name].items() if not name.startswith("_")}
    return getattr(diffusers, class_name).from_config(options)


@guarded
def _accelerate(folder: Path, options: dict[str, Any]) -> list[str]:
    if "model" in options:
        fastdiff.accelerate(options["model"])
        return ["accelerate accepted something that is not a model"]
    kind, _ = _denoiser_folder(folder)
    model = copy.deepcopy(theirs(kind.__name__))
    config = kind.part.config.from_mapping(model.config, "config")
    fastdiff.accelerate(model)
    try:
        model(**_arguments(config, torch.float32, options))
    finally:
        fastdiff.restore(model)
    return []


@guarded
def _adapters(folder: Path, options: dict[str, Any]) -> list[str]:
    """Load the adapters and the embedding beside a model, draw, and unload them. The bits from before must return."""
    pipe: Any = fastdiff.Pipeline.from_pretrained(folder, device="cpu")
    before, given, image = _bits(pipe), {}, folder / ip_adapters.NAME
    try:
        if os.path.lexists(folder / loras.NAME):
            pipe.load_lora_weights(folder / loras.NAME)
        if os.path.lexists(folder / embeddings.NAME):
            pipe.load_textual_inversion(folder / embeddings.NAME)
        if os.path.lexists(image):
            pipe.load_ip_adapter(image, image_encoder_folder=None)
            given["ip_adapter_image_embeds"] = ip_adapters.embeds(image)
        problems = _draw(pipe, given)
        pipe.unload_lora_weights()
        pipe.unload_textual_inversion()
        pipe.unload_ip_adapter()
    except REFUSALS:
        pipe.unload_ip_adapter()
        if pipe.get_list_adapters():  # an embedding was refused after it
            pipe.unload_lora_weights()
        if not torch.equal(before, _bits(pipe)):
            return ["other bits after a refusal"]
        raise
    return problems if torch.equal(before, _bits(pipe)) else [*problems, "other bits after unloading"]


@guarded
def _control(folder: Path, options: dict[str, Any]) -> list[str]:
    """Draw with the ControlNet beside a model. A sound call afterwards has the bits of one before."""
    net = options.pop("controlnet") if "controlnet" in options else controls.given(folder)
    pipe = fastdiff.Pipeline.from_pretrained(folder, controlnet=net, device="cpu")
    sound: dict[str, Any] = {"image": Image.new("RGB", (16, 16), (200, 10, 60)), "height": 16, "width": 16}
    sound = sound if pipe.controlnet is not None else {}
    before = _bits(pipe, **sound)
    try:
        return _draw(pipe, sound | options)
    finally:
        if not torch.equal(_bits(pipe, **sound), before):
            raise AssertionError("other bits after a call")


@guarded
def _image_prompt(folder: Path, options: dict[str, str]) -> list[str]:
    """Call an accelerated U-Net with IP-Adapters twice, and compare it with diffusers.

    A sound call afterwards has the bits of one before.
    """
    options = live.SOUND | options
    kind, loaded = options["kind"], options["loaded"]
    model, sound = copy.deepcopy(live.unet(kind, loaded)), live.sound(kind, loaded)
    fastdiff.accelerate(model)
    before, given = model(**sound).sample, live.called(**options)
    try:
        first, second = (model(**given).sample for _ in range(2))
    finally:
        if not torch.equal(model(**sound).sample, before):
            raise AssertionError("other bits after a call")
    problems = [] if torch.equal(first.nan_to_num(), second.nan_to_num()) else ["other bits in a second call"]
    if live.must_be_refused(options["place"], options["form"]):
        problems.append("taken, but it must be refused")
    expected = _of_diffusers(live.unet(kind, loaded), given)
    if expected is not None and not (first - expected).abs().max() <= 1e-4 * expected.abs().max():
        problems.append("not the prediction of diffusers")
    return problems


def _of_diffusers(model: Any, given: dict[str, Any]) -> torch.Tensor | None:
    """Return the prediction of a U-Net of diffusers, or None if it fails or is not finite."""
    try:
        with torch.no_grad():
            prediction = model(**given).sample
    except Exception:  # of any kind: diffusers checks little
        return None
    return prediction if prediction.isfinite().all() else None


def _bits(pipe: Any, **options: Any) -> torch.Tensor:
    return pipe(PROMPT, num_inference_steps=1, seed=3, output_type="pt", **options).images


LIBRARY: dict[str, Callable[[Path, dict[str, Any]], Outcome]] = {
    "pipeline": _pipeline,
    "load": _load,
    "model": _call_model,
    "load model": _load_model,
    "parts": _load_parts,
    "config": _config,
    "scheduler": _scheduler,
    "accelerate": _accelerate,
    "adapters": _adapters,
    "control": _control,
}
OF_TEXTS = {"weighted": _weighted, "image prompt": _image_prompt}
