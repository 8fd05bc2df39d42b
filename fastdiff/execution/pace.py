"""The pace of a run on a GPU: the host queues a few steps, and no more."""

from collections import deque

import torch

AHEAD = 8  # steps that may be queued, so that the GPU need not wait for the host; chosen, not measured


class Pace:
    """Holds the host back, so that a run that is stopped soon ends, and the steps that it tells of are nearly done."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ends: deque[torch.cuda.Event] = deque()  # of the steps that may still be queued

    def note(self) -> None:
        """Note that a step is queued, and wait until the one `AHEAD` before it is done."""
        if self._device.type != "cuda":
            return
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > AHEAD:
            self._ends.popleft().synchronize()
