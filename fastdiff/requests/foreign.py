"""The settings in pictures of other tools. The package sd-parsers reads them in a process of its own.

A hostile text can keep sd-parsers busy for a minute, so the process has limits of time and memory:
`python -m fastdiff.requests.foreign PICTURE PIXELS` prints the settings as JSON.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.errors import InputError
from fastdiff.extras import import_sd_parsers
from fastdiff.requests import png
from fastdiff.sampler_names import SCHEDULERS

if TYPE_CHECKING:
    from sd_parsers.data import Prompt, PromptInfo

FORMATS = ("PNG", "JPEG", "WEBP")
SECONDS = 10  # of one file
MEMORY = 2**30  # bytes of one process
MAX_NAMES = 12  # of settings that fastdiff lacks
MAX_NAME = 40  # characters
MAX_MODEL = 200  # characters
MODEL = "Model"  # in the names of settings that fastdiff lacks

_ONE = threading.Lock()  # files are read one at a time: hostile files keep one core busy, not all
_BAD_VALUE = (TypeError, ValueError, OverflowError)
_VALUES: dict[str, tuple[str, Callable[[Any], Any]]] = {  # settings of other tools, with our names and converters
    "steps": ("steps", int),
    "cfg_scale": ("guidance_scale", float),
    "seed": ("seed", int),
    "noise_seed": ("seed", int),
    "clip_skip": ("clip_skip", int),
    "width": ("width", int),
    "height": ("height", int),
}
_SIZES = ("size", "resolution")  # "512x768", "(832, 1216)"
_OUR_UPSCALERS = ("Latent", "Lanczos", "None")  # of A1111; "None" enlarges by Lanczos too
# A1111 reads brackets, and all of a long prompt
_WEIGHTED = re.compile(r"[()\[\]\\<]|\bBREAK\b|.{150}", re.DOTALL)
_SCHEDULES = ("scheduler", "noise_schedule")
_PLAIN = ("", "automatic", "normal")  # schedules that mean the default
_NO_SETTINGS = ["version", "app_version", "model_hash", "hashes", "metadata_scheme", "signed_hash", "request_type"]
_NO_SETTINGS += ["generation_mode", "full_prompt", "full_negative_prompt"]
_NO_SETTINGS += ["emptylatentimage", "saveimage", "previewimage"]  # ComfyUI's nodes


@dataclass(frozen=True)
class Foreign:
    """The settings of another tool: values named as in UncheckedRequest, and the names of settings that we lack."""

    tool: str
    values: dict[str, Any] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)  # with MODEL if the tool named one
    model: str = ""  # the file or its name, as the tool wrote it
    model_hash: str = ""  # in most tools the first digits of the file's SHA-256


def read(path: Path, most_pixels: int) -> Foreign | None:
    """Return the settings that another tool wrote into a PNG, JPEG or WebP; None if there are none.

    Raises InputError, which names the file, if it is damaged or too large, or if it takes too long to read.
    """
    import_sd_parsers("reading pictures of other tools")
    command = [sys.executable, "-m", __name__, str(path), str(most_pixels)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        with _ONE:
            ended = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"{path}: its settings take more than {SECONDS} s to read; type them in") from None
    if ended.returncode:
        raise InputError(f"{path} is damaged, or its settings are; save the picture again in the tool that made it")
    found = png.without_half_pairs(json.loads(ended.stdout))
    if "pixels" in found:
        raise InputError(f"{path} is too large ({found['pixels']} pixels); drop a smaller picture")
    return Foreign(**found) if found else None


def convert(info: "PromptInfo") -> Foreign:
    """Return what sd-parsers found, in our names. With several samplers, the first one counts."""
    sampler, *others = info.samplers
    said = {**info.metadata, **sampler.parameters, **_size_of_nodes(info.metadata)}
    by_key = {re.sub(r"\s", "_", name.lower()): (name, value) for name, value in said.items()}
    by_key |= {"model": (MODEL, sampler.model.name or sampler.model.hash)} if sampler.model else {}
    values: dict[str, Any] = {"prompt": _joined(sampler.prompts)}
    values |= {"negative_prompt": _joined(sampler.negative_prompts)} if _joined(sampler.negative_prompts) else {}
    by_key |= _sides(by_key)
    for key, (ours, kind) in _VALUES.items():
        if key in by_key:
            with suppress(*_BAD_VALUE):
                values[ours] = kind(by_key[key][1])
                del by_key[key]
    values |= _larger(by_key, values.get("steps", 0))
    texts = values["prompt"] + values.get("negative_prompt", "")
    if info.generator.value == "AUTOMATIC1111" and _WEIGHTED.search(texts):
        values["prompt_syntax"] = "weighted"
    if values.get("clip_skip") is not None and info.generator != "InvokeAI":
        values["clip_skip"] -= 1  # other tools count from 1, which uses all layers
    schedules = [by_key.pop(key)[1] for key in _SCHEDULES if key in by_key]
    values["scheduler"] = scheduler_name(str(sampler.name), str((schedules or [""])[0] or ""))
    lacking = [name for key, (name, value) in by_key.items() if value and key not in _NO_SETTINGS]
    lacking += [f"{len(others)} more samplers"] if others else []
    model = [
        str(text or "")[:MAX_MODEL] for text in ((sampler.model.name, sampler.model.hash) if sampler.model else ())
    ]
    return Foreign(info.generator.value, values, [name[:MAX_NAME] for name in lacking[:MAX_NAMES]], *model)


def _joined(prompts: Sequence["Prompt"]) -> str:
    return ", ".join(prompt.value for prompt in prompts)


def _size_of_nodes(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size in the first node of ComfyUI that has one."""
    nodes = [node for entries in metadata.values() if isinstance(entries, list) for node in entries]
    sized = [node for node in nodes if isinstance(node, dict) and {"width", "height"} <= node.keys()]
    return {side: sized[0][side] for side in ("width", "height")} if sized else {}


def _sides(by_key: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Take the size out of `by_key` and return it as width and height."""
    for key in _SIZES:
        sides = re.findall(r"\d+", str(by_key[key][1])) if key in by_key else []
        if len(sides) == 2:
            del by_key[key]
            return {"width": ("width", sides[0]), "height": ("height", sides[1])}
    return {}


def _larger(by_key: dict[str, tuple[str, Any]], steps: int) -> dict[str, Any]:
    """Take A1111's "Hires. fix" out of `by_key` and return it as settings of an enlarged picture.

    What differs stays there: another upscaler, and the steps of its second part. A1111 takes all of them by default,
    and we take the share that the strength says.
    """
    try:
        upscale, strength = (float(by_key[key][1]) for key in ("hires_upscale", "denoising_strength"))
        own = int(steps * strength)
    except (KeyError, *_BAD_VALUE):
        return {}
    if not upscale > 1:
        return {}
    del by_key["hires_upscale"], by_key["denoising_strength"]
    upscaler = str(by_key.get("hires_upscaler", ("", "Latent"))[1])
    if upscaler in _OUR_UPSCALERS:
        by_key.pop("hires_upscaler", None)
    theirs = by_key.pop("hires_steps", ("", steps))[1]
    if str(theirs) != str(own):
        by_key["hires_steps"] = ("Hires steps", theirs)
    mode = "latent" if upscaler.startswith("Latent") else "pixels"
    return {"upscale": upscale, "upscale_strength": strength, "upscale_mode": mode}


def scheduler_name(sampler: str, schedule: str = "") -> str:
    """Return our name of another tool's sampler and schedule, or that tool's own names if we lack it."""
    words = _words(sampler)
    is_karras = schedule.lower() == "karras" or words[-1:] in (["karras"], ["k"])
    kind = "karras" if is_karras else "" if schedule.lower() in _PLAIN else schedule
    return _NAMES.get((_key(words), kind), " ".join(filter(None, [sampler, schedule])))


def _words(sampler: str) -> list[str]:
    text = sampler.lower().replace("++", "pp").replace("ancestral", "a")
    return re.findall(r"[a-z0-9]+", text)


def _key(words: Sequence[str]) -> str:
    """Return the words as one, without the names of the library k-diffusion, of a schedule and of a device."""
    return "".join(word for word in words if word not in ("k", "karras", "gpu")).replace("kdpm", "dpm")


def _names() -> dict[tuple[str, str], str]:
    """Return our schedulers by sampler and schedule, under our names and those of AUTOMATIC1111."""
    return {
        (_key(_words(name)), (schedule or "").lower()): ours
        for ours in SCHEDULERS
        for sampler, schedule in [png.sampler_name(ours)]
        for name in (ours, sampler)
    }


_NAMES = _names()


def parse(path: str, most_pixels: int) -> dict[str, Any]:
    """Return the fields of Foreign for a picture, {} if it has no settings, or its `pixels` if they are too many.

    Damaged files raise errors of any kind.
    """
    from PIL import Image
    from sd_parsers import ParserManager

    with Image.open(path, formats=FORMATS) as image:
        if image.width * image.height > most_pixels:
            return {"pixels": f"{image.width}x{image.height}"}
        info = ParserManager().parse(image)
    return asdict(convert(info)) if info and info.samplers else {}


def _main(path: str, most_pixels: str) -> None:
    """Print what `parse` returns as JSON."""
    with suppress(ImportError):  # Windows has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print(json.dumps(parse(path, int(most_pixels))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
