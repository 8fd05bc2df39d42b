"""Memory that runs out, of a GPU or the host: less is computed at a time, else one line says what to lower.

An error keeps the frames that it went through, and these keep their tensors. So whatever is done about it is done after
its `except` block has ended.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

Result = TypeVar("Result")

_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # of CUDA and Triton, of the host, of its libraries


class OutOfMemoryError(MemoryError, torch.OutOfMemoryError):
    """No memory is left on the device or the host: both Python's error and torch's. The message is one line."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory ran out, in whatever words."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if "captur" in str(error):  # a CUDA graph whose capture was cut short complains too, and its error comes last
        return is_out_of_memory(error.__context__)
    return any(sign in str(error) for sign in _SIGNS)


def or_explain(function: Callable[[], Result], problem: str) -> Result:
    """Return what `function` returns. Where memory runs out, let it go and raise OutOfMemoryError with this line."""
    result = _attempt(function)
    if result is None:
        _let_go()
        raise OutOfMemoryError(problem)
    return result


class Portions:
    """The pictures of a run in portions that fit in memory: all at once; half as many whenever it runs out.

    A picture's bits do not depend on the portion that it is computed in, and a portion that is done stays done.
    """

    def __init__(
        self, count: int, device: torch.device, dtype: torch.dtype, *, halves: bool, release: Callable[[], None]
    ):
        """count: of pictures; halves: whether portions may shrink; release: lets go what models keep for later."""
        self.size = count
        self._device, self._dtype = device, dtype
        self._halves, self._release, self._released = halves, release, False

    def map(self, function: Callable[[slice], Result], count: int) -> list[Result]:
        """Return `function` of the slices that make up `count` pictures, in order. Raises OutOfMemoryError."""
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
        """The line of an error: where memory ran out, and what to lower."""
        pictures = "1 picture" if self.size == 1 else f"{self.size} pictures"
        lower = "lower height or width" if self.size == 1 else "lower batch size, height or width"
        return f"{self._device}: out of memory for {pictures} at a time; {remedies(lower, self._dtype)}"

    def _make_room(self) -> None:
        """Let go what is held and halve the portions. A single picture is tried again if nothing was let go before."""
        tried_all, self._released = self._released, True
        self._release()
        _let_go()
        if self.size > 1 and self._halves:
            self.size //= 2
        elif self.size > 1 or tried_all:
            raise OutOfMemoryError(self.problem)


def smaller_portions(count: int, size: int) -> str | None:
    """Return the line that says that `count` pictures are computed `size` at a time; None where that is all of them."""
    if size >= count:
        return None
    return f"out of memory for {count} pictures at a time; going on with at most {size}, which draws the same pictures"


def remedies(first: str, dtype: torch.dtype) -> str:
    """Return what can be done about memory, as words of a line: `first`, and what always helps."""
    return f"{first}{', use dtype bfloat16' if dtype.itemsize > 2 else ''} or take another device"


def _attempt(function: Callable[[], Result]) -> Result | None:
    """Return what `function` returns, or None where memory runs out."""
    try:
        return function()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    return None


def _let_go() -> None:
    """Give memory that nobody uses any more back to the device."""
    gc.collect()
    torch.cuda.empty_cache()
