"""Devices and dtypes: look them up by name, check them, and name them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._device import DeviceContext

from fastdiff.arguments import shown
from fastdiff.errors import DeviceLostError, InputError
from fastdiff.execution.memory import is_out_of_memory
from fastdiff.kernels.host.launching import fp8_obstacle

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOST = ("CUDA error", "Triton Error [CUDA]", "CUDNN_STATUS")  # in the errors of torch, Triton and cuDNN


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device. "auto" is a GPU if there is one, otherwise the CPU. Raises InputError if it does not exist."""
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device) and type(device) is not int:
        raise InputError(f"device: {shown(device)} is neither a name nor a torch.device; use auto, cuda, cuda:1 or cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, OverflowError, ValueError):
        raise InputError(f"device: {shown(device)} is unknown; use auto, cuda, cuda:1 or cpu") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device: {device} is not supported; use auto, cuda or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device: {device} does not exist ({torch.cuda.device_count()} GPUs found); use cpu or auto")
    return device


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype. "auto" is float32 on the CPU, bfloat16 on a GPU. Raises InputError if it is not in DTYPES."""
    if isinstance(dtype, str) and dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    raise InputError(f"dtype: {shown(dtype)} is unknown; use auto, {', '.join(DTYPES)}")


def check_precision(precision: str, device: torch.device) -> None:
    """Raise InputError if a GPU cannot multiply in the precision. A CPU multiplies the dequantised values."""
    reason = fp8_obstacle(device) if precision == "fp8" and device.type == "cuda" else None
    if reason is not None:
        raise InputError(f"precision: {device_name(device)} is {reason}, which needs sm_89 or later; use int8 or full")


def check_weights_dtype(dtype: Any) -> None:
    """Raise InputError if `dtype` cannot be the dtype of a model's weights."""
    if not isinstance(dtype, torch.dtype) or dtype not in (*DTYPES.values(), torch.float64):
        raise InputError(f"dtype: {shown(dtype)} is not a dtype for weights; use torch.{', torch.'.join(DTYPES)}")


def check_move(*args: Any, **kwargs: Any) -> None:
    """Raise InputError if a model cannot move to a device or dtype. Takes the arguments of `torch.nn.Module.to`."""
    try:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if any(isinstance(arg, float | complex) for arg in args):  # torch would take them as tensors, for their dtype
            raise TypeError
    except (TypeError, RuntimeError, OverflowError, ValueError):
        said = ", ".join([*map(shown, args), *(f"{name}={shown(value)}" for name, value in kwargs.items())])
        raise InputError(f"to: ({said}) is neither a device nor a dtype; use cuda, cpu or torch.bfloat16") from None
    if device is not None:
        resolve_device(device)
    if dtype is not None:
        check_weights_dtype(dtype)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Create the tensors of a block on the meta device, and skip the random initialisation of weights."""
    with _Unfilled("meta"):
        yield


class _Unfilled(DeviceContext):
    """Skip torch's initialisers: `normal_` on the meta device makes torch import its compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return super().__torch_function__(func, types, args, kwargs)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that a GPU failed. After that, CUDA refuses all further calls of this process."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST) and not is_out_of_memory(error)


@contextlib.contextmanager
def naming_lost_device() -> Iterator[None]:
    """Turn the error of a failed GPU into a DeviceLostError with a one-line message."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        reason = str(error).partition("\n")[0]
        raise DeviceLostError(
            f"the GPU failed, and this process can no longer use it ({reason}); restart fastdiff, or use the CPU"
        ) from None


def device_name(device: torch.device) -> str:
    """Return the GPU's product name ("NVIDIA H200"), or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch.": "bfloat16"."""
    return str(dtype).removeprefix("torch.")
