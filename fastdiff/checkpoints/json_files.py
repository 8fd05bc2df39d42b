"""JSON objects of a model folder into Python: read, and made into a dataclass that knows every key."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from fastdiff.errors import InputError

Config = TypeVar("Config")  # a dataclass


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in `path`; InputError where there is no such file or it holds anything else."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; a model folder in diffusers' layout has it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON ({error}); save the model again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not a JSON object; save the model again")
    return content


def from_mapping(cls: type[Config], mapping: Mapping[str, Any], source: str) -> Config:
    """Build the dataclass `cls` from a config; keys that start with _ are diffusers' bookkeeping.

    Lists become tuples. Raises InputError naming every key that `cls` does not have.
    """
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()}
    values = {key: value for key, value in values.items() if not key.startswith("_")}
    for key, only in getattr(cls, "SWITCHED_OFF", {}).items():
        if values.pop(key, only) != only:
            raise InputError(f"{source}: {key} {mapping[key]!r} is not supported; fastdiff runs {key} {only!r} only")
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known)
    if unknown:
        raise InputError(
            f"{source}: unknown option {', '.join(unknown)}; {cls.__name__} has {', '.join(sorted(known))}"
        )
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except TypeError as error:
        raise InputError(f"{source}: an option is of the wrong type ({error}); save the model again") from None
