"""How every kernel is launched, and what the card it is launched on can do."""

from functools import partial
from threading import Lock
from typing import overload

import torch
from torch import Tensor

from fastdiff.kernels.host.compile_worker import settle_key
from fastdiff.kernels.host.compiling import only_compiles
from fastdiff.kernels.host.recording import recorder
from fastdiff.kernels.host.weights import FP8

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that kernels take
FP8_CAPABILITY = (8, 9)  # from which on cards multiply e4m3
# Triton's interpreter stands for a small card that can do all.
INTERPRETER_CAPABILITY = (9, 0)
INTERPRETER_MULTIPROCESSORS = 8

_interpreter = Lock()  # which runs one kernel at a time


def launch(
    kernel, grid: tuple[int, ...], *args, num_warps: int, num_stages: int = 1, fp_fusion: bool = True, **constexprs
) -> None:
    """kernel[grid](*args, **constexprs) on the device of the first tensor, which need not be the current device.

    fp_fusion: multiplications and additions become one operation; without it each rounds on its own.
    """
    tensors = (getattr(arg, "base", arg) for arg in args)  # `base`: of a descriptor
    device, listener = next(tensor.device for tensor in tensors if isinstance(tensor, Tensor)), recorder()
    # fp_fusion always said, because Triton's default changes with version 3.10, and with it the bits
    options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=fp_fusion)
    options["launch_pdl"] = capability(device) >= (9, 0)  # see `await_inputs`
    compiles = only_compiles.get()
    if compiles:
        settle_key(kernel)
    run = partial(kernel.run, *args, grid=grid, warmup=compiles, **options, **constexprs)
    with torch.cuda.device(device) if device.type == "cuda" else _interpreter:
        run() if listener is None else listener.launch(kernel, run)


@overload
def side_by_side(tensor: Tensor) -> Tensor: ...
@overload
def side_by_side(tensor: None) -> None: ...
@overload
def side_by_side(tensor: Tensor | None) -> Tensor | None: ...
def side_by_side(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its channels side by side, as kernels read them: itself, or a copy."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETER_CAPABILITY


def fp8_obstacle(device: torch.device) -> str | None:
    """Say why a device multiplies no numbers of fp8, if it does not."""
    major, minor = capability(device)
    return None if (major, minor) >= FP8_CAPABILITY else f"sm_{major}{minor} and has no fp8"


def is_sm_90(device: torch.device) -> bool:
    """Whether it is such a card as our kernels and torch's library were measured on."""
    return device.type == "cuda" and capability(device) == (9, 0)


def has_descriptors(device: torch.device) -> bool:
    """Whether the card copies tiles by tensor descriptors, and has the shared memory for such tiles.

    That is sm_90 to sm_110; consumer cards from sm_120 on have 99 KB.
    """
    return (9, 0) <= capability(device) < (12, 0)


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def descriptor(tensor: Tensor, block: list[int]):
    """A tensor descriptor of a contiguous tensor, read in blocks of this shape; outside the tensor are zeros."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # absent where triton is

    return TensorDescriptor.from_tensor(tensor, block)


def gluon_descriptor(
    tensor: Tensor, block: list[int], *, shape: list[int] | None = None, strides: list[int] | None = None
):
    """A tensor descriptor for a kernel in Gluon: the tensor, or another view of its memory, in blocks of this shape.

    Outside the tensor are zeros; nothing is written there.
    """
    from triton.experimental.gluon import language as gl  # absent where triton is
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = gl.float8e4nv if tensor.dtype == FP8 else getattr(gl, str(tensor.dtype).removeprefix("torch."))
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(tensor, shape or list(tensor.shape), strides or list(tensor.stride()), block, layout)


def suits_descriptors(tensor: Tensor) -> bool:
    """Whether the copy engine can read the tensor: 16 or 8 bits, side by side, whole 16 bytes between rows."""
    *strides, last = tensor.stride()
    aligned = tensor.data_ptr() % 16 == 0 and all(stride * tensor.itemsize % 16 == 0 for stride in strides)
    return tensor.itemsize <= 2 and last == 1 and aligned
