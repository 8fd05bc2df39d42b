"""Limit how many steps the host queues on a GPU."""

from collections import deque

import torch

AHEAD = 8  # steps in the queue, so that the GPU need not wait for the host; chosen, not measured


class Pace:
    """Hold the host back, so that a stopped run ends soon, and reported steps are nearly finished."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ends: deque[torch.cuda.Event] = deque()  # ends of the steps that may still be queued

    def note(self) -> None:
        """Note that a step is queued, and wait until the step `AHEAD` before it has ended."""
        if self._device.type != "cuda":
            return
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > AHEAD:
            self._ends.popleft().synchronize()
