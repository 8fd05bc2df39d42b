"""Checks of callers' arguments. Each returns the normalized value, or raises an InputError that names the argument.

As in diffusers, a number may be a Python or numpy number, or a tensor with one element. A bool is not a number. This
module does not import torch; `execution/tensors.py` has the checks of tensors.
"""

import difflib
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypeVar

from fastdiff.errors import InputError

SHOWN = 80  # the most characters of a value in a message

Value = TypeVar("Value")


def shown(value: Any) -> str:
    """Return a value for a message: one line, at most SHOWN characters. A tensor shows only its shape and dtype."""
    try:
        if getattr(value, "shape", ()):
            return f"a {type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
        text = " ".join(repr(value).split())
    except Exception:  # a foreign repr may raise anything, and an int of 5,000 digits has no repr
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def did_you_mean(asked: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the `known` words that begin like `asked`, or else with the closest; or "".

    Lowercase words are found in any case.
    """
    words, lower = list(known), asked.lower()
    begun = [each for each in words if lower.strip("-") and each.startswith(lower)]
    close = [lower] if lower in words else begun[:3] or difflib.get_close_matches(lower, words, n=1)
    return f"did you mean {' or '.join(close)}?" if close else ""


def as_int(value: Any) -> int | None:
    """Return a whole number as an int, or None for anything else, including bools and floats."""
    if type(value) is int:
        return value
    try:
        return None if _is_bool(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # not whole, several elements, or a tensor without storage
        return None


def as_float(value: Any) -> float | None:
    """Return a finite number as a float, or None for anything else, including bools."""
    try:
        if getattr(value, "ndim", None) == 0:  # a numpy scalar or array, or a tensor
            value = value.item()
        found = float(value) if isinstance(value, Real) and not _is_bool(value) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def text(name: str, value: Any) -> str:
    """Return a string of one line."""
    if not isinstance(value, str) or not _is_one_line(value):
        raise InputError(f"{name}: {shown(value)} is not a string of one line")
    return value


def path(name: str, value: Any) -> str | os.PathLike:
    """Return a string or a path."""
    if not isinstance(value, str | os.PathLike) or not _is_one_line(os.fspath(value)):
        raise InputError(f"{name}: {shown(value)} is neither a string nor a path")
    return value


def word(value: str) -> str:
    """Return a word of a command line. It has no NUL, and half a surrogate pair only for a byte of a file name."""
    try:
        value.encode("utf-8", sys.getfilesystemencodeerrors())
    except UnicodeEncodeError:
        raise InputError(f"{shown(value)} holds half a surrogate pair, which is not a character; remove it") from None
    if "\0" in value:
        raise InputError(f"{shown(value)} holds NUL, which ends a string; remove it")
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Return a mapping of options by name."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{name}: {shown(value)} is not a mapping of options by name")
    return value


def instance(name: str, value: Any, kind: type[Value], wanted: str) -> Value:
    """Return an instance of `kind`. `wanted` tells the caller what to give."""
    if not isinstance(value, kind):
        raise InputError(f"{name}: {shown(value)} has the wrong type; give {wanted}")
    return value


def optional(check: Callable[..., Value], name: str, value: Any, *limits: Any) -> Value | None:
    """Return None unchanged, and check any other value with `check`."""
    return None if value is None else check(name, value, *limits)


def by_name(names: Sequence[str], args: Sequence[Any], options: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """Return the arguments of a call by name. `names`: of those that may be given by position, in order.

    Raises InputError for too many arguments by position, and for an argument that is given twice. `whose` names the
    method in errors.
    """
    if len(args) > len(names):
        taken = f"at most {len(names)}: {', '.join(names)}" if names else "none"
        raise InputError(f"{whose}: {len(args)} arguments by position, and it takes {taken}; give the others by name")
    given = dict(zip(names, args, strict=False))
    twice = [name for name in given if name in options]
    if twice:
        raise InputError(f"{twice[0]}: it is given by position and by name; leave out one of the two")
    return {**given, **options}


def renamed(name: str, value: Any, old: str, options: dict[str, Any]) -> Any:
    """Return an argument, or the one that `options` have by its old name, which is removed with a warning."""
    if value is None and old in options:
        warnings.warn(f"{old}: use {name}", DeprecationWarning, stacklevel=3)
        return options.pop(old)
    return value


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix an InputError of the block with the argument's name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _is_one_line(value: str | bytes) -> bool:
    """Whether a string has no control characters, and only characters that a file name can have."""
    try:
        return min(os.fsencode(value), default=32) >= 32
    except UnicodeEncodeError:
        return False
