"""Launch kernels, and report what the GPU supports."""

from functools import partial
from threading import Lock
from typing import overload

import torch
from torch import Tensor

from fastdiff.kernels.host.compile_worker import settle_key
from fastdiff.kernels.host.compiling import only_compiles
from fastdiff.kernels.host.recording import recorder
from fastdiff.kernels.host.weights import FP8

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # supported by the kernels
FP8_CAPABILITY = (8, 9)  # the first that multiplies e4m3
LARGE_AMPERE = ((8, 0), (8, 7))  # A100 and Orin, with more shared memory than the other cards without descriptors
# Triton's interpreter acts as a small GPU that supports everything.
INTERPRETER_CAPABILITY = (9, 0)
INTERPRETER_MULTIPROCESSORS = 8

_interpreter = Lock()  # the interpreter runs one kernel at a time


def launch(
    kernel, grid: tuple[int, ...], *args, num_warps: int, num_stages: int = 1, fp_fusion: bool = True, **constexprs
) -> None:
    """Run `kernel[grid](*args, **constexprs)` on the device of the first tensor, which need not be the current device.

    fp_fusion: fuse multiplications with additions; without it each operation rounds separately.
    """
    tensors = (getattr(arg, "base", arg) for arg in args)  # a descriptor's tensor is its `base`
    device, listener = next(tensor.device for tensor in tensors if isinstance(tensor, Tensor)), recorder()
    # always pass fp_fusion: Triton's default changes in version 3.10, and the bits would change with it
    options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=fp_fusion)
    options["launch_pdl"] = capability(device) >= (9, 0)  # see `await_inputs`
    compiles = only_compiles.get()
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
    """Return the tensor with contiguous channels, as kernels read it; a copy only if necessary."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETER_CAPABILITY


def fp8_obstacle(device: torch.device) -> str | None:
    """Say why a device cannot multiply in fp8, or return None."""
    major, minor = capability(device)
    return None if (major, minor) >= FP8_CAPABILITY else f"sm_{major}{minor} and has no fp8"


def is_sm_90(device: torch.device) -> bool:
    """Whether the device is an sm_90 GPU, on which our kernels and torch's library were measured."""
    return device.type == "cuda" and capability(device) == (9, 0)


def has_descriptors(device: torch.device) -> bool:
    """Whether the GPU copies tiles with tensor descriptors and has enough shared memory for these tiles.

    That is sm_90 to sm_110. Consumer GPUs from sm_120 on have only 99 KB.
    """
    return (9, 0) <= capability(device) < (12, 0)


def stages_for_two(most: int, step: int, rest: int, device: torch.device) -> int:
    """Return the stages of a loop: `most`, or on a card without descriptors the most with which two programs fit.

    A multiprocessor without descriptors has 164 KB of shared memory (A100) or 100 KB. The card reserves 1 KB for each
    program. A loop of n stages holds n - 1 steps there. It has at least 2 stages, even if only one program fits. The
    number of stages changes no bit.

    Args:
        step: bytes that a step loads.
        rest: bytes of everything else.
    """
    if has_descriptors(device):
        return most
    each = (164 if capability(device) in LARGE_AMPERE else 100) * 512 - 1024
    return min(most, max(2, 1 + (each - rest) // step))


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def descriptor(tensor: Tensor, block: list[int]):
    """Return a tensor descriptor of a contiguous tensor for blocks of this shape; reads outside it give zeros."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # Triton may not be installed

    return TensorDescriptor.from_tensor(tensor, block)


def gluon_descriptor(
    tensor: Tensor, block: list[int], *, shape: list[int] | None = None, strides: list[int] | None = None
):
    """Return a tensor descriptor for a Gluon kernel, with blocks of this shape.

    `shape` and `strides` give another view of the tensor's memory. Reads outside it give zeros; writes are dropped.
    """
    from triton.experimental.gluon import language as gl  # Triton may not be installed
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = gl.float8e4nv if tensor.dtype == FP8 else getattr(gl, str(tensor.dtype).removeprefix("torch."))
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(tensor, shape or list(tensor.shape), strides or list(tensor.stride()), block, layout)


def suits_descriptors(tensor: Tensor) -> bool:
    """Whether TMA can read the tensor: 16-bit or 8-bit, contiguous channels, base and strides aligned to 16 bytes."""
    *strides, last = tensor.stride()
    aligned = tensor.data_ptr() % 16 == 0 and all(stride * tensor.itemsize % 16 == 0 for stride in strides)
    return tensor.itemsize <= 2 and last == 1 and aligned
