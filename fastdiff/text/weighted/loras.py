"""`<lora:name:0.8>` in prompts, as in A1111. Imports no torch."""

import re
from typing import NamedTuple

from fastdiff.arguments import as_float, shown
from fastdiff.errors import InputError

_TAG = re.compile(r"<lora:([^<>:]+)(?::([^<>]*))?>")


class Tag(NamedTuple):
    """A LoRA that a prompt names."""

    name: str
    weight: float


def split_loras(text: str) -> tuple[str, tuple[Tag, ...]]:
    """Return a prompt without its tags, and the tags in order. Raises InputError for a weight that is no number."""
    return _TAG.sub("", text), tuple(Tag(match[1], _weight(match[1], match[2])) for match in _TAG.finditer(text))


def check_no_loras(text: str) -> None:
    """Raise InputError for a prompt that names a LoRA."""
    for tag in split_loras(text)[1]:
        raise InputError(
            f"prompt: <lora:{tag.name}> names a LoRA; load it with load_lora_weights, and leave it out of the prompt"
        )


def _weight(name: str, text: str | None) -> float:
    try:
        weight = as_float(1.0 if text is None else float(text))
    except ValueError:
        weight = None
    if weight is None:
        raise InputError(f"prompt: <lora:{name}>: its weight {shown(text)} is not a number; write <lora:{name}:0.8>")
    return weight
