"""Checks of what callers pass: each returns the value as the code reads it, or raises an InputError that names it.

A number may be Python's, numpy's or a tensor of one, as diffusers takes them; a bool is none. No torch is imported:
the checks of tensors are in `execution/tensors.py`.
"""

import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypeVar

from fastdiff.errors import InputError

SHOWN = 80  # characters of a value in a message

Value = TypeVar("Value")


def shown(value: Any) -> str:
    """Return a value as a message shows it: on one line, not too long, and of a tensor its shape and dtype alone."""
    try:
        if getattr(value, "shape", ()):
            return f"a {type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
        text = " ".join(repr(value).split())
    except Exception:  # whatever a stranger's repr raises; an int of 5,000 digits has none
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def as_int(value: Any) -> int | None:
    """Return a whole number as an int; None for anything else, a bool and a float among them."""
    if type(value) is int:
        return value
    try:
        return None if _is_bool(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # not whole, several elements, or a tensor without memory
        return None


def as_float(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else, a bool among them."""
    try:
        if getattr(value, "ndim", None) == 0:  # a scalar or an array of numpy, a tensor
            value = value.item()
        found = float(value) if isinstance(value, Real) and not _is_bool(value) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def text(name: str, value: Any) -> str:
    """Return a text of one line."""
    if not isinstance(value, str) or not _is_one_line(value):
        raise InputError(f"{name}: {shown(value)} is not a text of one line")
    return value


def path(name: str, value: Any) -> str | os.PathLike:
    """Return a text or a path."""
    if not isinstance(value, str | os.PathLike) or not _is_one_line(os.fspath(value)):
        raise InputError(f"{name}: {shown(value)} is neither a text nor a path")
    return value


def word(value: str) -> str:
    """Return a word of a command line: it has no NUL, and half a surrogate pair only for a byte of a file's name."""
    try:
        value.encode("utf-8", sys.getfilesystemencodeerrors())
    except UnicodeEncodeError:
        raise InputError(f"{shown(value)} holds half a surrogate pair, which is no character; remove it") from None
    if "\0" in value:
        raise InputError(f"{shown(value)} holds NUL, the end of a text; remove it")
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Return a mapping of options by name."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{name}: {shown(value)} is not a mapping of options by name")
    return value


def instance(name: str, value: Any, kind: type[Value], wanted: str) -> Value:
    """Return an object of a class; `wanted` says what to give."""
    if not isinstance(value, kind):
        raise InputError(f"{name}: {shown(value)} is none; give {wanted}")
    return value


def optional(check: Callable[..., Value], name: str, value: Any, *limits: Any) -> Value | None:
    """Return None as it is, and anything else as `check` does."""
    return None if value is None else check(name, value, *limits)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the argument's name before an InputError of the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _is_one_line(value: str | bytes) -> bool:
    """Whether a name has neither control characters nor letters that no file name can have."""
    try:
        return min(os.fsencode(value), default=32) >= 32
    except UnicodeEncodeError:
        return False
