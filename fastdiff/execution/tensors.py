"""Check tensors from callers. The checks use only what the host knows, so none waits for a GPU."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.kernels.host.leaves import is_traced

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INDICES = (torch.int64, torch.int32)  # torch's dtypes for embedding lookups
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REAL = FLOATS + WHOLE


def tensor(name: str, value: Any, dtypes: Collection[torch.dtype], *, in_memory: bool = True) -> Tensor:
    """Return `value` if it is a dense tensor of one of the dtypes, otherwise raise InputError.

    Args:
        in_memory: whether to refuse tensors on the meta device.
    """
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: {shown(value)} is not a tensor; give a torch.Tensor")
    if value.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(f"{name}: it is {value.dtype}; give a tensor of {wanted}")
    if value.layout != torch.strided or (in_memory and value.is_meta):
        raise InputError(f"{name}: it is a {value.layout} tensor on {value.device}; give a dense tensor with memory")
    return value


def beside(name: str, value: Tensor, device: torch.device) -> Tensor:
    """Return `value` if it is on `device`, otherwise raise InputError."""
    if value.device != device:
        raise InputError(f"{name}: it is on {value.device}, but the rest is on {device}; move it with .to()")
    return value


def within(name: str, value: Tensor, least: int, most: int) -> Tensor:
    """Return `value` if its elements are from `least` to `most`, otherwise raise InputError. Only for CPU tensors."""
    if value.device.type == "cpu" and value.numel() and not is_traced():
        low, high = (int(bound) for bound in value.aminmax())
        if low < least or high > most:
            raise InputError(f"{name}: {low if low < least else high} is out of range; use {least} to {most}")
    return value


def count_writes(tensors: Iterable[Tensor]) -> int | None:
    """Return how often torch has seen the tensors change in place; None for tensors of inference mode, without a count.

    Writes through `.data` or numpy, and by kernels outside of torch, have no count.
    """
    count = 0
    for each in tensors:
        if each.is_inference():
            return None
        count += each._version
    return count
