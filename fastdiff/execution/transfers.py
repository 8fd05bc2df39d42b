"""Asynchronous copies between the host and a GPU: the host continues while the GPU still works."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def upload(data: Any, device: torch.device) -> Tensor:
    """Return a host tensor, or numbers, on `device`, as torch.as_tensor does."""
    found = torch.as_tensor(data)
    if found.device.type == "cpu" and device.type == "cuda":
        return found.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned memory until the copy ends
    return found.to(device)


def fetch(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host. The returned function waits for the copy and returns it."""
    if tensor.device.type != "cuda":
        return lambda: tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait
