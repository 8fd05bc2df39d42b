"""Arguments and results of functions of tensors, which CUDA graphs and CPU programs replay."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# A tensor, or a tuple or named tuple of `Tensors`: one argument may have several tensors.
Tensors = Tensor | tuple[Any, ...]
Function = Callable[..., Tensors]


@dataclass(frozen=True, eq=False)
class Fixed:
    """An argument whose tensors nobody changes. A graph copies it once, not at each replay with the same object."""

    tensors: Tensors


def plain(inputs: tuple[Tensors | Fixed, ...]) -> tuple[Tensors, ...]:
    """Return the arguments with the tensors of each `Fixed` instead of it."""
    return tuple(each.tensors if isinstance(each, Fixed) else each for each in inputs)


def map_tensors(function: Callable[..., Any], *trees: Tensors) -> Any:
    """Apply `function` to each tensor of a tree, or to corresponding tensors of several trees, like `tree_map`."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    parts = [map_tensors(function, *each) for each in zip(*trees, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def chosen(outputs: Any, wanted: Container[int] | None) -> Any:
    """Return the items of a tuple at the indices in `wanted`; None for all."""
    return outputs if wanted is None else tuple(each for i, each in enumerate(outputs) if i in wanted)


class Plainly:
    """Call `function` as `Graphed` and `Programmed` do, without replays."""

    def __init__(self, function: Function):
        self._function = function

    def __call__(self, *inputs: Tensors | Fixed, wanted: Container[int] | None = None) -> Any:
        return chosen(self._function(*plain(inputs)), wanted)
