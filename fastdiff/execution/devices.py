"""Devices and dtypes by their names, and their names."""

import torch

from fastdiff.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device; auto is a GPU if there is one, else the CPU. Raises InputError for one that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
    except RuntimeError:
        raise InputError(f"device: {device!r} is unknown; use auto, cuda, cuda:1 or cpu") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device: {device} is not supported; use auto, cuda or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device: {device} is not there ({torch.cuda.device_count()} GPUs found); use cpu or auto")
    return device


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype: auto is float32 on the CPU, bfloat16 on a GPU. Raises InputError for one that DTYPES lacks."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    raise InputError(f"dtype: {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")


def device_name(device: torch.device) -> str:
    """Return the GPU's own name ("NVIDIA H200"), or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
