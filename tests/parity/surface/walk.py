"""Walk the public names of a class of diffusers, and say what the class of fastdiff lacks or takes in another way."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from torch import nn

from fastdiff import InputError
from fastdiff.refused import ATTRIBUTES

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NOTHING = inspect.Parameter.empty

Equivalent = Mapping[tuple[str, str], tuple[Any, str]]  # (method, parameter) -> our default, and why it is as good


def public_names(theirs: type, base: type = nn.Module) -> list[str]:
    """Return the public names of a class, without those of its base that are not diffusers'."""
    return [name for name in dir(theirs) if not name.startswith("_") and not hasattr(base, name)]


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function by name, without `self` and `cls`."""
    found = inspect.signature(function).parameters
    return {name: each for name, each in found.items() if name not in ("self", "cls")}


def differences(name: str, theirs: Callable, ours: Callable, equivalent: Equivalent) -> Iterator[str]:
    """Yield what a caller of diffusers' function would notice: names, positions and defaults of its parameters."""
    wanted, given = parameters(theirs), parameters(ours)
    takes_all = [each.kind for each in given.values() if each.kind in VARIABLE]
    places = [each.name for each in given.values() if each.kind in POSITIONAL]
    for position, (key, parameter) in enumerate(wanted.items()):
        if parameter.kind in VARIABLE or len(takes_all) == 2:
            continue
        if key not in given:
            if inspect.Parameter.VAR_KEYWORD not in takes_all:
                yield f"{name}: no parameter {key}"
            continue
        if key in places and places.index(key) != position:
            yield f"{name}: {key} has position {places.index(key)}, not {position}"
        default, allowed = given[key].default, equivalent.get((name, key))
        wrong = default is not NOTHING if parameter.default is NOTHING else not _equal(default, parameter.default)
        is_laxer = parameter.default is NOTHING and default is None
        if wrong and not is_laxer and (allowed is None or not _equal(default, allowed[0])):
            yield f"{name}: the default of {key} is {default!r}, not {parameter.default!r}"
    for key in given.keys() - wanted.keys():
        if given[key].default is NOTHING and given[key].kind not in VARIABLE:
            yield f"{name}: {key} must be given, and diffusers has no such parameter"


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether two defaults are equal. A list and a tuple are, if their items are."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return [*ours] == [*theirs]
    return ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool)


def missing(theirs: type, ours: Any, refused: Mapping[str, str], equivalent: Equivalent, base: type) -> list[str]:
    """Return a line for each public name of diffusers' class that our object neither has as diffusers nor refuses."""
    lines = []
    for name in public_names(theirs, base):
        if name in refused and is_refused(type(ours), name):
            continue
        if not hasattr(ours, name):
            lines.append(f"{name}: missing")
        elif inspect.isroutine(inspect.getattr_static(theirs, name)):
            lines += differences(name, getattr(theirs, name), getattr(type(ours), name), equivalent)
    return lines


def is_refused(ours: type, name: str) -> bool:
    """Whether the class raises for a name, instead of having a method of its own."""
    attribute = inspect.getattr_static(ours, name, None)
    function = attribute.fget if isinstance(attribute, property) else attribute
    return getattr(function, "__qualname__", "").startswith("refusal.")


def assert_refused(ours: Any, names: list[str]) -> None:
    """Check that each name raises one InputError that names it: when it is read, or called with any arguments."""
    for name in names:
        with pytest.raises(InputError, match=f"^{name}: ") as error:
            if name in ATTRIBUTES:
                getattr(ours, name)
            else:
                getattr(ours, name)("any", argument=1)
        assert len(str(error.value).splitlines()) == 1


def options_of(function: Callable) -> list[str]:
    """Return the arguments that a function with **kwargs documents, and those that it takes out of its kwargs."""
    documented = re.findall(r"^ {4}(\w+) \(`", inspect.getdoc(function) or "", re.MULTILINE)
    taken = re.findall(r"kwargs\.pop\(\s*\"(\w+)\"", inspect.getsource(function))
    return [*dict.fromkeys([*documented, *taken])]
