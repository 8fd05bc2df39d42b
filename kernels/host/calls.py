"""One call of an operation: its arguments, checked once, and the ways to run it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


def parts_of(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors of an input that may be a pair, which is read as their concatenation."""
    return x if isinstance(x, tuple) else (x,)


def check_pictures(parts: tuple[Tensor, ...]) -> None:
    """Raise ValueError unless the parts of x are pictures (N, H, W, C) of the same N, H and W."""
    if any(part.ndim != 4 or part.shape[:3] != parts[0].shape[:3] for part in parts):
        shapes = [tuple(part.shape) for part in parts]
        raise ValueError(f"x: expected (N, H, W, C) with equal N, H and W, got {shapes}")


class Call(ABC, Generic[R]):
    """One call of an operation: a frozen dataclass of its arguments, checked on construction, and the ways to run it.

    A call describes its arguments; only `plans.choices` decides which way it runs. R is the return type, the same for
    every way.
    """

    name: ClassVar[str] = ""  # in the table of choices; "" for an operation without rows there

    def __post_init__(self) -> None:
        self.check()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the tensors."""

    @abstractmethod
    def check(self) -> None:
        """Raise a ValueError that names the argument which does not fit."""

    def facts(self) -> Mapping[str, Any]:
        """Return the hashable sizes and options, by name, that the table of choices matches on."""
        return {}

    def obstacle(self) -> str | None:
        """Say why our kernels do not take these arguments, or return None."""
        return None

    @property
    def in_gluon(self) -> bool:
        """Whether the kernel for sm_90 is in Gluon, which only some versions of Triton are known to compile."""
        return True

    def hopper_obstacle(self) -> str | None:
        """Say why the kernel for sm_90 does not take these tensors, or return None."""
        return "the operation has no kernel for sm_90"

    def hopper_plan(self) -> str | None:
        """Name the sm_90 kernel's plan for these shapes, whether or not the table has it."""
        return None

    @abstractmethod
    def reference(self) -> R:
        """Run torch's own functions: the CPU path, and the reference implementation for the kernels."""

    def library(self) -> R:
        """Run torch's library."""
        return self.reference()

    @abstractmethod
    def kernel(self) -> R:
        """Run the Triton kernel for all GPUs."""

    def hopper(self) -> R:
        """Run the kernel for sm_90."""
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
