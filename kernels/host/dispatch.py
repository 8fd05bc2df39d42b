"""Triton kernel or torch reference: chosen here and nowhere else."""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from fastdiff.kernels.host.recording import because, recorder

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


class Declined(str):
    """What a kernel returns where it does not cover its arguments, or torch's library is faster: why, in one line."""


class Operation:
    """An operation called like its torch `reference`, which is the CPU path and the ground truth of its kernel.

    `kernel` takes the same arguments and returns Declined where the reference is to run instead.
    """

    def __init__(self, reference: Callable):
        self.reference = reference
        self.triton: Callable | None = None
        functools.update_wrapper(self, reference)

    def kernel(self, function: Callable) -> Callable:
        """Decorator: `function` is this operation's Triton kernel."""
        self.triton = function
        return function

    def __call__(self, x, *args, **kwargs):
        listener = recorder()
        if listener is None:
            return self._run(x, *args, **kwargs)
        with listener.call(self, (x, *args), kwargs):
            return self._run(x, *args, **kwargs)

    def _run(self, x, *args, **kwargs):
        result = self._obstacle(x) or self.triton(x, *args, **kwargs)
        if not isinstance(result, Declined):
            return result
        because(lambda: str(result))
        return self.reference(x, *args, **kwargs)

    def _obstacle(self, x) -> Declined | None:
        """Why no kernel can run on the tensor (or the pair of tensors) x: Triton needs a GPU, or its interpreter."""
        tensor = parts_of(x)[0]
        if self.triton is None:
            return Declined("it has no kernel")
        if _references_only.get():
            return Declined("references_only")
        if not _has_triton():
            return Declined("Triton is not installed")
        if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            return Declined("no CUDA device")
        return None
