"""The settings that AUTOMATIC1111 and its kin write into a PNG, as the values of the form that they stand for."""

import re
from collections.abc import Callable
from typing import Any

from fastdiff.requests import png
from fastdiff.sampler_names import SCHEDULERS

_SETTING = re.compile(r'\s*([^:,]+):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)')
_SCHEDULERS = {png.sampler_name(name): name for name in SCHEDULERS}
_PLAIN = ("", "automatic", "normal")  # schedule types that change nothing
_SAID = ("Size", "Schedule type")  # as width and height, and with the sampler


def parse_parameters(text: str) -> tuple[dict[str, Any], list[str]]:
    """The values in such a text, by the names of ui.options.Options, and the names of the settings that are none.

    It is the prompt, the negative prompt, and a line of settings that begins with Steps.
    """
    before, steps, line = text.rpartition("Steps: ")
    if not steps:
        before, line = text, ""
    prompt, _, negative = before.partition("Negative prompt:")
    settings = {name.strip(): value.strip().strip('"') for name, value in _SETTING.findall(steps + line)}
    values: dict[str, Any] = {"prompt": prompt.strip()}
    values |= {"negative_prompt": negative.strip()} if negative.strip() else {}
    rest = [name for name in settings if name not in (*_KINDS, *_SAID, "Sampler")]
    for name, (key, kind) in _KINDS.items():
        if name in settings:
            try:
                values[key] = kind(settings[name])
            except ValueError:
                rest.append(name)
    if "Sampler" in settings:
        values["scheduler"] = _scheduler(settings["Sampler"], settings.get("Schedule type", ""))
    if size := re.fullmatch(r"(\d{1,5})x(\d{1,5})", settings.get("Size", "")):
        values |= {"width": int(size[1]), "height": int(size[2])}
    return values, rest


def _scheduler(sampler: str, schedule_type: str) -> str:
    """The name of ours, or the other tool's own, which is none."""
    if sampler.endswith(" Karras"):  # as it was written before there were schedule types
        sampler, schedule_type = sampler.removesuffix(" Karras"), "Karras"
    kind = None if schedule_type.lower() in _PLAIN else schedule_type
    return _SCHEDULERS.get((sampler, kind), " ".join(filter(None, [sampler, kind])))


_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "Steps": ("steps", int),
    "CFG scale": ("guidance_scale", float),
    "Seed": ("seed", int),
    "Clip skip": ("clip_skip", lambda text: int(text) - 1),  # 1 is all layers there
}
