"""A call of an operation: its arguments, checked once, and the ways to run it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


def parts_of(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of an input that may be a pair, read as their concatenation."""
    return x if isinstance(x, tuple) else (x,)


def check_pictures(parts: tuple[Tensor, ...]) -> None:
    """Raise ValueError unless the parts of x are pictures (N, H, W, C) of the same N, H and W."""
    if any(part.ndim != 4 or part.shape[:3] != parts[0].shape[:3] for part in parts):
        shapes = [tuple(part.shape) for part in parts]
        raise ValueError(f"x: expected (N, H, W, C), the same N, H and W, got {shapes}")


class Call(ABC, Generic[R]):
    """One call of an operation: a frozen dataclass of its arguments, checked when it is made, and the ways to run it.

    A call says what is so of its arguments; which way is taken is for `plans.choices` alone to say. R is what the call
    returns, whichever way.
    """

    name: ClassVar[str] = ""  # in the table of choices; "" for an operation that is not in the table

    def __post_init__(self) -> None:
        self.check()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tensors are."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError naming the argument that does not fit."""

    def facts(self) -> Mapping[str, Any]:
        """Return what the table of choices knows a call by: hashable sizes and options, by name."""
        return {}

    def obstacle(self) -> str | None:
        """Say why our kernels do not take these arguments, if they do not."""
        return None

    @property
    def in_gluon(self) -> bool:
        """Whether the kernel for sm_90 is in Gluon, which few versions of Triton are known to compile."""
        return True

    def hopper_obstacle(self) -> str | None:
        """Say why the kernel for sm_90 does not take these tensors, if it does not."""
        return "no kernel was made for sm_90 alone"

    def hopper_plan(self) -> str | None:
        """Name the plan of the kernel for sm_90 that shapes such as these have, whether or not it is in the table."""
        return None

    @abstractmethod
    def reference(self) -> R:
        """Run by torch's own functions: the CPU path, and the ground truth of the kernel."""

    def library(self) -> R:
        """Run by torch's library."""
        return self.reference()

    @abstractmethod
    def kernel(self) -> R:
        """Run by the Triton kernel that every card has."""

    def hopper(self) -> R:
        """Run by the kernel for sm_90."""
        raise NotImplementedError


class PartsCall(Call[R]):
    """A call whose x may be a pair of tensors, read as their concatenation."""

    x: Tensor | tuple[Tensor, ...]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return parts_of(self.x)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device
