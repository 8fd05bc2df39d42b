"""Models that wait in the host's memory and are on the GPU only while they work."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def rest_on_host(model: nn.Module) -> None:
    """Keep a model that rests on the CPU in pinned memory, which a GPU reads at full speed."""
    if torch.cuda.is_available():
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()


@contextmanager
def on_gpu(models: Mapping[nn.Module, Callable[[], None]], device: torch.device) -> Iterator[None]:
    """Have CPU models on `device` during the block. Each comes with a function that frees all else that it keeps there.

    Nothing is copied on the way back: their weights on the host stayed where they were.
    """
    homes: list[tuple[nn.Parameter, Tensor]] = [
        (parameter, parameter.data) for model in models for parameter in model.parameters()
    ]
    try:
        for model in models:
            model.to(device)
        yield
    finally:
        for release in models.values():
            release()
        for parameter, data in homes:
            parameter.data = data
