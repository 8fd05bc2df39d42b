"""How many pictures may share a step: the caller's limit, the memory that is free, and what has failed before."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from fastdiff.engine.turns import graph_size

MOST = 32  # pictures that share a step, if memory decides; chosen, not measured
SHARE = 0.4  # of the free memory for the largest graph: the smaller ones together take as much again
REMEMBERED = 64  # keys

Result = TypeVar("Result")


class Limits:
    """The most pictures of a step or a decoding, by its key."""

    def __init__(self, max_batch: int | None):
        """max_batch: None measures. See `Engine`."""
        self._max_batch = max_batch
        self._known: OrderedDict[Hashable, int] = OrderedDict()

    def most(self, key: Hashable, device: torch.device) -> int:
        """Return how many pictures may be computed together. If memory decides, the first step shows one request."""
        if self._max_batch is not None:
            return min(self._max_batch, self._known.get(key, self._max_batch))
        return self._known.get(key, MOST if device.type == "cpu" else 1)

    def measured(self, key: Hashable, device: torch.device, pictures: int, function: Callable[[], Result]) -> Result:
        """Return the result of `function`, which computes so many pictures. Measure it if memory decides."""
        if self._max_batch is not None or key in self._known or device.type == "cpu":
            return function()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        taken = torch.cuda.max_memory_allocated(device) - before
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        self._remember(key, fitting(taken, pictures, torch.cuda.mem_get_info(device)[0] + unused))
        return result

    def failed(self, key: Hashable, pictures: int) -> None:
        """Remember that memory ran out with so many pictures."""
        self._remember(key, max(1, graph_size(pictures) // 2))

    def _remember(self, key: Hashable, most: int) -> None:
        self._known[key] = min(most, self._known.pop(key, most))
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def fitting(taken: int, pictures: int, free: int) -> int:
    """Return how many pictures fit: a power of two, at most MOST.

    Args:
        taken: the bytes that a step of so many pictures took.
        pictures: their number.
        free: bytes of the device.
    """
    fits = int(SHARE * free * pictures / max(1, taken))
    return max(1, min(MOST, 1 << max(0, fits.bit_length() - 1)))
