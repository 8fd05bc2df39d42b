"""FILE[:VALUE]: a file of weights that a flag or a PNG names, with a value such as the token of an embedding."""

import re
from typing import NamedTuple

# A path may have colons itself, so the file's suffix ends it
_WITH_VALUE = re.compile(r"(.+?\.(?:safetensors|sft|ckpt|pt|pth|bin)):(.+)", re.IGNORECASE | re.DOTALL)


class FileOption(NamedTuple):
    """A file, and the value that follows it, if there is one."""

    path: str
    value: str | None = None

    @classmethod
    def parse(cls, text: str) -> "FileOption":
        """Parse `cat.safetensors` or `cat.safetensors:<cat>`."""
        match = _WITH_VALUE.fullmatch(text)
        return cls(text) if match is None else cls(match[1], match[2])

    def __str__(self) -> str:
        return self.path if self.value is None else f"{self.path}:{self.value}"
