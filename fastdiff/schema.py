"""Options from outside the program, with types and bounds in their annotations.

A *kind* is such an annotation: `Annotated[int, Interval(ge=1, le=64)]`, `Literal["conv", "resnet"] | None`. pydantic
checks values strictly: neither a string nor True is a number. This module does not import torch.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Interval, Len
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fastdiff.arguments import shown
from fastdiff.errors import InputError

AnySchema = TypeVar("AnySchema", bound="Schema")

_MOST_VALUES = 2**20  # the largest array that becomes a list; no option is that long
_ATOMS = frozenset({str, int, float, bool, NoneType})  # most values of a vocabulary
_DEPTH = 4  # the deepest nested list that becomes tuples; no option is that deep


class Wanted(str):
    """The words for a kind, as part of its annotation. An error says that a value "is not" these words."""


class Schema:
    """The base of frozen dataclasses of options. The constructor checks each field against its annotation.

    Raises InputError that names the option, its value, and what the option accepts.
    """

    SWITCHED_OFF: ClassVar[Mapping[str, Any]] = {}  # further options of diffusers' class, and the one value supported
    SHOWN_AS: ClassVar[Mapping[str, str]] = {}  # user-facing names of fields

    def __post_init__(self) -> None:
        for name, kind, adapter in _adapters(type(self)):  # type: ignore[arg-type]  # a class is hashable
            value = _checked(self.SHOWN_AS.get(name, name), getattr(self, name), kind, adapter)
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise InputError for options that exclude each other. Each option was already checked on its own."""

    @classmethod
    def from_mapping(cls: type[AnySchema], mapping: Mapping[str, Any], source: object) -> AnySchema:
        """Build an instance from the options of a JSON file or a call.

        Keys that start with _ are diffusers' bookkeeping and are ignored. Raises InputError that begins with `source`
        and names every missing or unknown key.
        """
        values = {key: value for key, value in mapping.items() if not key.startswith("_")}
        for key, only in cls.SWITCHED_OFF.items():
            value = values.pop(key, only)
            if type(value) is not type(only) or value != only:
                raise InputError(f"{source}: {key} {shown(value)} is not supported; fastdiff runs {only!r} only")
        known = _kinds(cls).keys()  # type: ignore[arg-type]
        unknown = sorted(values.keys() - known)
        if unknown:
            names = ", ".join(sorted(known))
            raise InputError(f"{source}: unknown option {', '.join(unknown)}; {cls.__name__} has {names}")
        missing = [name for name in _required(cls) if name not in values]  # type: ignore[arg-type]
        if missing:
            raise InputError(f"{source}: {', '.join(missing)} is missing; add it, or save the file again")
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None


def option_names(cls: type[Schema]) -> tuple[str, ...]:
    """Return the names of a schema's options, in order."""
    return tuple(_kinds(cls))  # type: ignore[arg-type]  # a class is hashable


def option_kind(cls: type[Schema], name: str) -> Any:
    """Return the kind of one of a schema's options."""
    return _kinds(cls)[name]  # type: ignore[arg-type]


def signature(cls: type[Schema], positions: Sequence[str]) -> inspect.Signature:
    """Return the signature of a function that takes a schema's options, the ones in `positions` also by position."""
    defaults = {each.name: each.default for each in fields(cls)}  # type: ignore[arg-type]
    by_position, by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    first = [name for name in positions if name in defaults]
    kinds = {**dict.fromkeys(first, by_position), **{name: by_keyword for name in defaults if name not in first}}
    return inspect.Signature([inspect.Parameter(name, kind, default=defaults[name]) for name, kind in kinds.items()])


def checked(name: str, value: Any, kind: Any) -> Any:
    """Return a value checked against a kind. Raises InputError that begins with `name`.

    Lists become tuples, and numpy and torch numbers become Python numbers.
    """
    return _checked(name, value, kind, _adapter(kind))


def _checked(name: str, value: Any, kind: Any, adapter: TypeAdapter[Any]) -> Any:
    try:
        return adapter.validate_python(_plain(value))
    except ValidationError:
        raise InputError(f"{name}: {shown(value)} is not {wanted(kind)}") from None


def whole(least: int, most: int) -> Any:
    """Return the kind of whole numbers from `least` to `most`, both included."""
    return Annotated[int, Interval(ge=least, le=most)]


def wanted(kind: Any, bounds: str = "") -> str:
    """Return the words for what a kind accepts besides None, such as "a whole number from 1 to 64"."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        words = [each for each in parts[1:] if isinstance(each, Wanted)]
        return words[0] if words else wanted(parts[0], "".join(map(_bounds, parts[1:])))
    if kind in _WORDS:
        return _WORDS[kind] + bounds
    if origin is Literal:
        return f"one of {', '.join(str(each) for each in parts if each is not None)}"
    if origin is tuple:
        return f"a list{bounds if ... in parts else f' of {len(parts)}'}, each {wanted(parts[0])}"
    if origin is dict:
        return f"an object in which every value is {wanted(parts[1])}"
    return ", or ".join(wanted(part) for part in parts if part is not NoneType)


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
}


def _bounds(bound: Any) -> str:
    """Return the words that an Interval or a Len adds to a kind."""
    if isinstance(bound, Len):
        least = f"{bound.min_length} to " if bound.min_length else "up to "
        return f" of {least}{bound.max_length}"
    if not isinstance(bound, Interval):
        return ""
    if bound.gt is not None:
        return f" greater than {bound.gt}"
    return f" from {bound.ge} to {bound.le}" if bound.le is not None else f" of at least {bound.ge}"


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    """Return the kind of each field."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


@functools.cache
def _adapters(cls: type) -> tuple[tuple[str, Any, TypeAdapter[Any]], ...]:
    """Return the name, the kind and the adapter of each field: the hash of a kind takes longer than its check."""
    return tuple((name, kind, _adapter(kind)) for name, kind in _kinds(cls).items())


@functools.cache
def _required(cls: type) -> tuple[str, ...]:
    """Return the fields without a default."""
    return tuple(each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING)


def _plain(value: Any, depth: int = _DEPTH) -> Any:
    """Convert numpy and torch values to Python's, lists to tuples, and mappings to dicts."""
    if type(value) in _ATOMS:
        return value
    if hasattr(value, "tolist"):
        if math.prod(getattr(value, "shape", ())) > _MOST_VALUES:
            return value
        try:
            value = value.tolist()
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            return value
    if not depth:
        return value
    if isinstance(value, list | tuple):
        return tuple(_plain(each, depth - 1) for each in value)
    if isinstance(value, Mapping):
        return {key: _plain(each, depth - 1) for key, each in value.items()}
    return value
