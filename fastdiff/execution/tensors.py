"""Checks of the tensors that callers pass, by what the host knows of them: no check waits for a GPU."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.errors import InputError

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INDICES = (torch.int64, torch.int32)  # that torch looks up in a table
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REAL = FLOATS + WHOLE


def tensor(name: str, value: Any, dtypes: Collection[torch.dtype], *, in_memory: bool = True) -> Tensor:
    """Return a dense tensor of one of the dtypes, with elements where it must be `in_memory`. InputError for others."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: {shown(value)} is not a tensor; give a torch.Tensor")
    if value.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(f"{name}: it is {value.dtype}; give a tensor of {wanted}")
    if value.layout != torch.strided or (in_memory and value.is_meta):
        raise InputError(f"{name}: it is a {value.layout} tensor on {value.device}; give a dense one that has memory")
    return value


def beside(name: str, value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor that is on `device`. InputError for one that is elsewhere."""
    if value.device != device:
        raise InputError(f"{name}: it is on {value.device}, and the rest is on {device}; move it with .to()")
    return value


def within(name: str, value: Tensor, least: int, most: int) -> Tensor:
    """Return a tensor whose elements are from `least` to `most`. InputError for others, which only a CPU's can tell."""
    if value.device.type == "cpu" and value.numel():
        low, high = (int(bound) for bound in value.aminmax())
        if low < least or high > most:
            raise InputError(f"{name}: {low if low < least else high} is out of range; it is from {least} to {most}")
    return value
