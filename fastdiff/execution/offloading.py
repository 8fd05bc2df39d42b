"""Offloading: keep models in host memory, and on the GPU only while they run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def rest_on_host(model: nn.Module) -> None:
    """Move a CPU model's parameters to pinned memory, which a GPU reads at full speed."""
    if torch.cuda.is_available():
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()


@contextmanager
def on_gpu(models: Mapping[nn.Module, Callable[[], None]], device: torch.device) -> Iterator[None]:
    """Keep CPU models on `device` during the block.

    Nothing is copied back: the weights also stay on the host.

    Args:
        models: each model, with a function that frees everything else that the model keeps on the device.
    """
    homes: list[tuple[nn.Parameter, Tensor]] = [
        (parameter, parameter.data) for model in models for parameter in model.parameters()
    ]
    buffers = [
        (module._buffers, name, buffer)
        for model in models
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
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
        for own, name, buffer in buffers:
            own[name] = buffer
