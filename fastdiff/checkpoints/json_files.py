"""JSON files of a model folder: read, whatever they hold."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdiff.errors import InputError

MAX_BYTES = 2**23  # of a file: ImageNet-21k's names of its classes are 1 MB, the indices of the largest models less
MAX_DEPTH = 32  # of objects and lists in one another: diffusers' files nest 3 of them
MAX_DIGITS = 20  # of a whole number, as many as 2^64 has

_TOO_DEEP = f"more than {MAX_DEPTH} objects and lists in one another"


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in `path`, which may be a link to a file elsewhere.

    Raises InputError where there is no such file, where it is none (a pipe, which would wait for its writer, a device),
    is over MAX_BYTES or holds anything else.
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
        raise InputError(f"{path} does not exist; a model folder in diffusers' layout has it") from None
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable JSON ({error}); save the model again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not a JSON object; save the model again")
    return content


def parse_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text; ValueError in one line where it is malformed, nested deeply or a number is too long.

    `parse_constant` is json's: it makes a value of NaN and of Infinity.
    """
    try:
        content = json.loads(text, parse_int=_bounded_int, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [each for holder in level for each in _children(holder)]
    if level:
        raise ValueError(_TOO_DEEP)
    return content


def _children(value: Any) -> list[Any]:
    """The objects and lists in a JSON value; text and numbers hold none."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inside if isinstance(each, dict | list)]


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return int(digits)
