"""Handle GPU and host memory that runs out: compute fewer pictures at a time, or say in one line what to lower.

An error keeps its frames alive, and the frames keep their tensors alive. So all handling happens after the `except`
block has ended.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

Result = TypeVar("Result")

_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # CUDA and Triton, the host, CUDA's libraries


class OutOfMemoryError(MemoryError, torch.OutOfMemoryError):
    """The device or the host is out of memory. Both Python's and torch's error; the message is one line."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory ran out, from any library."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if "captur" in str(error):  # an interrupted CUDA graph capture raises its own error on top of the cause
        return is_out_of_memory(error.__context__)
    return any(sign in str(error) for sign in _SIGNS)


def or_explain(function: Callable[[], Result], problem: str) -> Result:
    """Return the result of `function`. If memory runs out, free it and raise OutOfMemoryError with `problem`."""
    result = _attempt(function)
    if result is None:
        let_go()
        raise OutOfMemoryError(problem)
    return result


class Portions:
    """Split a run's pictures into portions that fit in memory: first all of them, then half as many when it runs out.

    A picture's bits do not depend on its portion, and finished portions are kept.
    """

    def __init__(
        self, count: int, device: torch.device, dtype: torch.dtype, *, halves: bool, release: Callable[[], None]
    ):
        """Start with one portion.

        Args:
            count: the number of pictures.
            halves: whether portions may shrink.
            release: frees what models keep for later.
        """
        self.size = count
        self._device, self._dtype = device, dtype
        self._halves, self._release, self._released = halves, release, False

    def map(self, function: Callable[[slice], Result], count: int) -> list[Result]:
        """Return the results of `function` for consecutive slices of `count` pictures. Raises OutOfMemoryError."""
        results: list[Result] = []
        first = 0
        while first < count:
            part = slice(first, min(first + self.size, count))
            result = _attempt(partial(function, part))
            if result is None:
                self._make_room()
            else:
                results.append(result)
                first = part.stop
        return results

    @property
    def problem(self) -> str:
        """The error message: where memory ran out, and what to lower."""
        pictures = "1 picture" if self.size == 1 else f"{self.size} pictures"
        lower = "lower height or width" if self.size == 1 else "lower batch size, height or width"
        return f"{self._device}: out of memory for {pictures} at a time; {remedies(lower, self._dtype)}"

    def _make_room(self) -> None:
        """Free what models keep, and halve the portions.

        A single picture is tried again, unless this freed memory before. Raises OutOfMemoryError if nothing is left to
        try.
        """
        tried_all, self._released = self._released, True
        self._release()
        let_go()
        if self.size > 1 and self._halves:
            self.size //= 2
        elif self.size > 1 or tried_all:
            raise OutOfMemoryError(self.problem)


def smaller_portions(count: int, size: int) -> str | None:
    """Return a line that says that `count` pictures are computed `size` at a time; None if that is all of them."""
    if size >= count:
        return None
    return f"out of memory for {count} pictures at a time; continuing with at most {size}; the pictures are the same"


def remedies(first: str, dtype: torch.dtype) -> str:
    """Return the remedies for a message about memory: `first`, then the ones that always help."""
    return f"{first}{', use dtype bfloat16' if dtype.itemsize > 2 else ''} or use another device"


def _attempt(function: Callable[[], Result]) -> Result | None:
    """Return the result of `function`, or None if memory runs out."""
    try:
        return function()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    return None


def let_go() -> None:
    """Return unused memory to the device."""
    gc.collect()
    torch.cuda.empty_cache()
