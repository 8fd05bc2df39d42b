"""Outputs: named tuples that are also read by name in brackets, as diffusers' and transformers' outputs are."""

from typing import Any, TypeVar

AnyOutput = TypeVar("AnyOutput", bound=type)


def read_by_name(kind: AnyOutput) -> AnyOutput:
    """Return a class of named tuples, changed so that `output["sample"]` is `output.sample`.

    Its method `to_tuple` returns a plain tuple, without fields that are None.
    """

    def __getitem__(self: Any, key: Any) -> Any:
        if not isinstance(key, str):
            return tuple.__getitem__(self, key)
        if key not in self._fields:
            raise KeyError(key)
        return getattr(self, key)

    def to_tuple(self: Any) -> tuple[Any, ...]:
        return tuple(each for each in self if each is not None)

    for method in (__getitem__, to_tuple):
        setattr(kind, method.__name__, method)
    return kind
