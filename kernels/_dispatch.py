"""Triton kernel or torch reference: chosen here and nowhere else."""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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


def _runs_triton(x) -> bool:
    """Whether Triton can run on the tensor (or the pair of tensors) x: on a GPU, or anywhere in its interpreter."""
    tensor = x[0] if isinstance(x, tuple) else x
    return _has_triton() and (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


class Operation:
    """An operation called like its torch `reference`, which is the CPU path and the ground truth of its kernel.

    `kernel` takes the same arguments and returns None where it does not cover them.
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
        if self.triton is not None and _runs_triton(x) and not _references_only.get():
            result = self.triton(x, *args, **kwargs)
            if result is not None:
                return result
        return self.reference(x, *args, **kwargs)
