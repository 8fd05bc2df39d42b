"""Ghosts: tensors with a shape, strides and a dtype on a GPU that is not there, and without memory.

Inside `haunted`, everything that torch makes on a GPU is a ghost. Operations on ghosts run on torch's meta device,
which only computes shapes. Tensors on the CPU are real: token ids, schedules and the seeds' noise. A ghost that is
copied to the host arrives as ones, so a check for finite values passes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)  # with an index, or torch asks CUDA for the current device
_META = torch.device("meta")
_ADDRESS = 2**20  # of every ghost's memory: torch aligns an allocation to 512 bytes


class Ghost(Tensor):
    """A tensor on the absent GPU. `shape_of` is a tensor on the meta device with the same shape, strides and offset.

    To torch's own C++ code the ghost is on the meta device too, or torch would ask CUDA for its devices.
    """

    shape_of: Tensor

    @staticmethod
    def __new__(cls, shape_of: Tensor) -> "Ghost":
        ghost = Tensor._make_wrapper_subclass(
            cls, shape_of.shape, shape_of.stride(), shape_of.storage_offset(), dtype=shape_of.dtype, device=_META
        )
        ghost.shape_of = shape_of
        return ghost

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: Tensor) -> None:  # `Module.to` sets it
        assert isinstance(other, Ghost)
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.shape_of = other.shape_of

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """Return an address, which is aligned as the real one would be."""
        return _ADDRESS + int(self.shape_of.storage_offset()) * self.shape_of.itemsize


class _Haunting(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch's compiler, which takes seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _Moves(TorchFunctionMode):
    """Ask for a device in the moves that a dispatch mode sees too late: to where a ghost is, and from numbers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.to and isinstance(args[-1], Ghost):
            return args[0].to(GPU, args[-1].dtype)
        if function is Tensor.new_tensor and isinstance(args[0], Ghost):
            return torch.tensor(args[1], dtype=args[0].dtype).to(GPU)
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            return function(*args, **kwargs).to(device)
        return function(*args, **kwargs)


@contextmanager
def haunted() -> Iterator[None]:
    """Make the tensors of a GPU ghosts inside the block.

    There is no inference mode there: it would hand operations to a dispatch mode before torch takes them apart.
    """
    nothing: dict[str, Any] = {"__enter__": lambda self: None, "__exit__": lambda self, *error: None}
    with patch.multiple(torch.inference_mode, **nothing), torch.no_grad(), _Moves(), _Haunting():
        yield


def _is_gpu(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _holds_ghost(value: Any) -> bool:
    """Whether the arguments of an operation read ghosts, or ask for a result on a GPU."""
    if isinstance(value, list | tuple):
        return any(map(_holds_ghost, value))
    return isinstance(value, Ghost) or _is_gpu(value)


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to each tensor and device of nested lists and tuples."""
    if isinstance(value, list | tuple):
        return type(value)(_each(function, item) for item in value)
    return function(value) if isinstance(value, Tensor | torch.device) else value


def _is_there(tensor: Tensor, device: Any = None, dtype: Any = None, **_: Any) -> bool:
    """Whether a copy to a GPU would change nothing: to torch's C++ code a ghost is elsewhere."""
    return isinstance(tensor, Ghost) and _is_gpu(device) and dtype in (None, tensor.dtype)


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation: on the meta device if it reads or makes ghosts, otherwise as it is."""
    name = function._overloadpacket.__name__
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if name in _ON_HOST and not isinstance(args[0], Ghost):
        return _ON_HOST[name](args[0])
    if not _holds_ghost((args, [*kwargs.values()])):
        return function(*args, **kwargs)
    if name in _OF_GHOSTS:
        return _OF_GHOSTS[name](args[0])
    if name == "_to_copy" and _is_there(args[0], **kwargs):
        return args[0]
    if name == "copy_" and not isinstance(args[0], Ghost):
        return args[0].fill_(1)
    to_host = "device" in kwargs and not _is_gpu(kwargs["device"])

    def shape_of(value: Any) -> Any:
        if isinstance(value, Ghost):
            return value.shape_of
        return value.to("meta") if isinstance(value, Tensor) else _META

    def stand_for(shape: Tensor) -> Tensor:
        return torch.empty_like(shape, device="cpu").fill_(1) if to_host else Ghost(shape)

    named = {key: _each(shape_of, value) for key, value in kwargs.items()}
    return _each(stand_for, function(*_each(shape_of, args), **named))


def _only_value(ghost: Ghost) -> bool | int | float:
    return True if ghost.dtype == torch.bool else 1.0 if ghost.dtype.is_floating_point else 1


# Pinned memory needs CUDA.
_ON_HOST: dict[str, Callable[[Tensor], Any]] = {
    "is_pinned": lambda tensor: True,
    "pin_memory": lambda tensor: tensor,
    "_pin_memory": lambda tensor: tensor,
}
_OF_GHOSTS: dict[str, Callable[[Ghost], Any]] = {
    "_local_scalar_dense": _only_value,
    "isfinite": lambda ghost: torch.ones_like(ghost, dtype=torch.bool),  # on meta, torch would import its compiler
}
