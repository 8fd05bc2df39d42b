"""Read the JSON files of a model folder, whatever they contain."""

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdiff.errors import InputError

MAX_BYTES = 2**24  # of a file: the tokenizer.json of Qwen3 has 11 MB
MAX_DEPTH = 32  # of nested objects and lists: diffusers' files nest 3
MAX_DIGITS = 31  # of an integer: 10^30, the length of a tokenizer of transformers without a limit, has as many

_TOO_DEEP = f"more than {MAX_DEPTH} nested objects and lists"


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in `path`, which may be a symbolic link.

    Raises InputError if the file does not exist, is not a regular file (a pipe would block until someone writes to it),
    is larger than MAX_BYTES, or holds anything but a JSON object.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{path} is not a regular file; save the model again")
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InputError(f"{path} has more than the {MAX_BYTES >> 20} MB that fastdiff reads; save the model again")
        content = parse_json(text.decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give a model folder in diffusers' layout, which has it") from None
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable JSON ({error}); save the model again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not a JSON object; save the model again")
    return content


def parse_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON text.

    `parse_constant` is called for NaN, for Infinity and for numbers that are larger than any float. Default: as in
    `json.loads`. Raises ValueError, with a message of one line, for malformed text, for more than MAX_DEPTH levels and
    for integers of more than MAX_DIGITS digits.
    """

    def parse_float(digits: str) -> Any:
        number = float(digits)
        return parse_constant(digits) if parse_constant and math.isinf(number) else number

    try:
        content = json.loads(text, parse_int=_bounded_int, parse_float=parse_float, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [each for holder in level for each in _children(holder)]
    if level:
        raise ValueError(_TOO_DEEP)
    return content


def _children(value: Any) -> list[Any]:
    """Return the objects and lists directly inside a JSON value."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inside if isinstance(each, dict | list)]


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return int(digits)
