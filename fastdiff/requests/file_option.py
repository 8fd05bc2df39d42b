"""FILE[:VALUE]: a file that a flag or a PNG names, with the token of an embedding or the weight of a LoRA."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from fastdiff.arguments import as_float, shown
from fastdiff.checkpoints.hub import CACHED, LORA_NAME
from fastdiff.errors import InputError

# A path may have colons itself, so the file's suffix ends it
_WITH_VALUE = re.compile(r"(.+?\.(?:safetensors|sft|ckpt|pt|pth|bin)):(.+)", re.IGNORECASE | re.DOTALL)
_SUFFIX = re.compile(r"\.(?:safetensors|sft|ckpt|pt|pth|bin)$", re.IGNORECASE)
_HUB_ID_WITH_VALUE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(.+)", re.ASCII | re.DOTALL)


class FileOption(NamedTuple):
    """A file, and the value that follows it, if there is one."""

    path: str
    value: str | None = None

    @classmethod
    def parse(cls, text: str) -> "FileOption":
        """Parse `cat.safetensors`, `cat.safetensors:<cat>`, `org/cat` or `org/cat:<cat>`."""
        match = _WITH_VALUE.fullmatch(text) or _HUB_ID_WITH_VALUE.fullmatch(text)
        return cls(text) if match is None else cls(match[1], match[2])

    def __str__(self) -> str:
        return self.path if self.value is None else f"{self.path}:{self.value}"


def weight_of(option: FileOption) -> float:
    """Return the weight of a LoRA, 1 by default. Raises InputError if it is not a finite number."""
    try:
        weight = as_float(1.0 if option.value is None else float(option.value))
    except ValueError:
        weight = None
    if weight is None:
        raise InputError(f"lora {shown(option.path)}: its weight {shown(option.value)} is not a number; give FILE:0.8")
    return weight


def lora_name(path: str) -> str:
    """Return the name of a LoRA in prompts: of `a/ink.safetensors` it is ink, as in A1111.

    The file of a hub id has the name of its repository.
    """
    *folders, last = re.split(r"[\\/]", path)
    repository = next((each for each in folders if each.startswith(CACHED)), None)
    if last == LORA_NAME and repository is not None:
        return repository.rpartition("--")[2]
    return _SUFFIX.sub("", last) or last


def lora_names(options: Sequence[FileOption]) -> list[str]:
    """Return the names of LoRAs in prompts, all different. Files of one name have their paths as names."""
    names, paths = [lora_name(option.path) for option in options], {option.path for option in options}
    return [
        option.path if names.count(name) > 1 or name in paths else name
        for name, option in zip(names, options, strict=True)
    ]
