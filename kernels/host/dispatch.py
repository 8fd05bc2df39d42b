"""Triton kernel, one for sm_90 alone, torch's library or torch reference: chosen here and nowhere else."""

import functools
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from fastdiff.kernels.host.hopper import confirmation, gluon
from fastdiff.kernels.host.launching import is_sm_90
from fastdiff.kernels.host.recording import because, besides, recorder

P = ParamSpec("P")
R = TypeVar("R")

_references_only: ContextVar[bool] = ContextVar("references_only", default=False)


@contextmanager
def references_only() -> Iterator[None]:
    """Run every operation by its torch reference inside the block: the oracle of kernel tests and benchmarks."""
    token = _references_only.set(True)
    try:
        yield
    finally:
        _references_only.reset(token)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


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

    R is what it returns, whichever way.
    """

    def __post_init__(self) -> None:
        self.check()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tensors are."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError naming the argument that does not fit."""

    @abstractmethod
    def reference(self) -> R:
        """Run by torch's own functions: the CPU path, and the ground truth of the kernel."""

    def obstacle(self) -> str | None:
        """Say why the kernel does not cover these arguments, if it does not."""
        return None

    def library_reason(self) -> str | None:
        """Say why `library` is the better way, where that was measured."""
        return None

    def library_is_fastest(self) -> bool:
        """Say whether the library is faster than a kernel made for sm_90 alone, too."""
        return False

    def library(self) -> R:
        """Run where `library_reason` says so: by torch's library."""
        return self.reference()

    @abstractmethod
    def kernel(self) -> R:
        """Run by the Triton kernel that every card has."""

    def hopper_plan(self) -> str | None:
        """Name the plan of a kernel made for sm_90 alone, where there is one for shapes such as these."""
        return None

    def hopper_obstacle(self) -> str | None:
        """Say why that kernel does not cover these arguments here, if it does not."""
        return "no kernel was made for sm_90 alone"

    def hopper(self) -> R:
        """Run by that kernel, where nothing is in its way."""
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


class Operation(Generic[P, R]):
    """An operation, called with the fields of its `Call`; each way to run it is there by its name, for tests."""

    def __init__(self, name: str, parse: Callable[P, Call[R]]):
        self.__name__, self.__doc__, self.__module__ = name, parse.__doc__, parse.__module__
        self.parse = self.__wrapped__ = parse

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        listener = recorder()
        if listener is None:
            return run(self.parse(*args, **kwargs))
        with listener.call(self, args, kwargs):
            return run(self.parse(*args, **kwargs))

    def reference(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.parse(*args, **kwargs).reference()

    def library(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.parse(*args, **kwargs).library()

    def kernel(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.parse(*args, **kwargs).kernel()

    def hopper(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.parse(*args, **kwargs).hopper()


def run(call: Call[R]) -> R:
    """Choose the way, and tell a recorder why."""
    reason = _unavailable(call.device) or call.obstacle()
    if reason is not None:
        because(reason)
        return call.reference()
    confirmed = is_sm_90(call.device) and gluon.is_confirmed(call.hopper_plan())
    if not confirmed or call.library_is_fastest():
        return _run_anywhere(call)
    reason = confirmation.plan_obstacle(call.hopper_plan(), call.device) or call.hopper_obstacle()
    if reason is None:
        return call.hopper()
    y = _run_anywhere(call)
    besides(f"not as {call.hopper_plan()}: {reason}")
    return y


def _run_anywhere(call: Call[R]) -> R:
    """By torch's library or by the kernel that every card has."""
    reason = call.library_reason()
    if reason is not None:
        because(reason)
        return call.library()
    return call.kernel()


def _unavailable(device: torch.device) -> str | None:
    """Say why no kernel can run there, if none can: Triton needs a GPU, or its interpreter."""
    if _references_only.get():
        return "references_only"
    if not _has_triton():
        return "Triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "no CUDA device"
    return None
