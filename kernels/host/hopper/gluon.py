"""Where kernels made for sm_90 are chosen: the versions of Triton they run in, and what a run on a card has confirmed.

They are a further way to run an operation, `hopper`; `host.dispatch` asks here whether it is taken.
"""

import torch
from torch import Tensor

from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.hopper import verdict
from fastdiff.kernels.host.launching import is_sm_90
from fastdiff.kernels.host.weights import FP8

# Of Triton, in which the kernels in Gluon passed their tests on a card: Gluon is experimental, and its names, and what
# its compiler makes of a kernel, change between versions. 3.6 is the version that they were measured in. In 3.7.1 all
# 426 GPU tests named hopper passed, beside torch 2.11; plans were not timed there. In 3.9.0 the time was up after 350
# of them, which passed. In 3.8.0 convolutions do not compile.
VERSIONS = ((3, 6), (3, 7))
# The names of plans (`host.hopper.attention`, `conv2d`, `linear`) that a run on an H200 confirmed: the tests passed,
# and the kernel was faster than what would run in its place, the plain kernel or torch's library; of a plan that bits
# bind to all batches of a picture, over the batches that were measured (kernels/README.md names where it loses a
# little). Where a plan is not among them its shapes run as if it were not there.
CONFIRMED = frozenset((
    "attention to 80 keys",
    "attention to 80 keys, causal",
    "attention to 80 keys, masked",
    "attention to 256 keys, heads of 32",
    "attention to 256 keys, heads of 80",
    "attention to 256 keys, heads of 160",
    "attention to 256 keys, heads of 256",
    "attention to 8192 keys, heads of 48",
    "attention to 8192 keys, heads of 64",
    "attention to more keys, heads of 64",
    "attention to more keys, heads of 80",
    "conv2d-same-65536-128",
    "conv2d-same-65536-128-shortcut",
    "conv2d-same-65536-256",
    "conv2d-same-16384-128",
    "conv2d-same-16384-128-shortcut",
    "conv2d-same-16384-256",
    "conv2d-same-16384-512",
    "conv2d-same-16384-512-shortcut",
    "conv2d-same-16384-more",
    "conv2d-same-4096-128",
    "conv2d-same-4096-128-shortcut",
    "conv2d-same-4096-256",
    "conv2d-same-4096-256-shortcut",
    "conv2d-same-4096-512",
    "conv2d-same-4096-512-shortcut",
    "conv2d-same-4096-more",
    "conv2d-same-4096-more-shortcut",
    "conv2d-same-1024-128",
    "conv2d-same-1024-128-shortcut",
    "conv2d-same-1024-256",
    "conv2d-same-1024-256-shortcut",
    "conv2d-same-1024-512",
    "conv2d-same-1024-more",
    "conv2d-same-1024-more-shortcut",
    "conv2d-same-256-128",
    "conv2d-same-256-128-shortcut",
    "conv2d-same-256-256",
    "conv2d-same-256-256-shortcut",
    "conv2d-same-256-512",
    "conv2d-same-256-512-shortcut",
    "conv2d-same-256-more",
    "conv2d-same-256-more-shortcut",
    "conv2d-up-65536-128",
    "conv2d-up-16384-256",
    "conv2d-up-16384-more",
    "conv2d-up-4096-more",
    "conv2d-up-1024-more",
    "conv2d-same-65536-128, fp8",
    "conv2d-same-65536-128-shortcut, fp8",
    "conv2d-same-65536-256, fp8",
    "conv2d-same-16384-512, fp8",
    "conv2d-same-16384-512-shortcut, fp8",
    "conv2d-same-16384-more, fp8",
    "conv2d-same-4096-256, fp8",
    "conv2d-same-4096-512, fp8",
    "conv2d-same-4096-more, fp8",
    "conv2d-same-4096-more-shortcut, fp8",
    "conv2d-same-1024-more, fp8",
    "conv2d-same-1024-more-shortcut, fp8",
    "conv2d-same-256-512, fp8",
    "conv2d-up-65536-128, fp8",
    "conv2d-up-16384-256, fp8",
    "conv2d-up-16384-more, fp8",
    "conv2d-up-4096-more, fp8",
    "conv2d-up-1024-more, fp8",
    "conv2d-same-65536-128, int8",
    "conv2d-same-65536-256, int8",
    "conv2d-same-16384-128, int8",
    "conv2d-same-16384-512, int8",
    "conv2d-same-16384-more, int8",
    "conv2d-same-4096-256, int8",
    "conv2d-same-4096-512, int8",
    "conv2d-same-4096-more, int8",
    "conv2d-same-1024-more, int8",
    "conv2d-same-1024-128, int8",
    "conv2d-same-1024-256, int8",
    "conv2d-same-256-256, int8",
    "conv2d-same-256-512, int8",
    "conv2d-up-65536-128, int8",
    "conv2d-up-16384-more, int8",
    "conv2d-up-4096-more, int8",
    "conv2d-up-1024-more, int8",
    "geglu 320 to 2560",
    "geglu 640 to 5120",
    "geglu 1280 to 10240",
    "geglu 640 to 5120, fp8",
    "geglu 1280 to 10240, fp8",
    "geglu 320 to 2560, int8",
    "geglu 640 to 5120, int8",
    "geglu 1280 to 10240, int8",
    "linear 320 to 320",
    "linear 320 to 960",
    "linear 640 to 640",
    "linear 640 to 1920",
    "linear 768 to 24960",
    "linear 1152 to 1152",
    "linear 1152 to 3456",
    "linear 1152 to 4608",
    "linear 1280 to 1280",
    "linear 1280 to 320, residual",
    "linear 1280 to 3840",
    "linear 2048 to 166400",
    "linear 2560 to 640, residual",
    "linear 4608 to 1152",
    "linear 5120 to 1280, residual",
    "linear 320 to 320, fp8",
    "linear 640 to 640, fp8",
    "linear 640 to 1920, fp8",
    "linear 1152 to 1152, fp8",
    "linear 1152 to 3456, fp8",
    "linear 1152 to 4608, fp8",
    "linear 1280 to 320, residual, fp8",
    "linear 1280 to 1280, fp8",
    "linear 1280 to 3840, fp8",
    "linear 2560 to 640, residual, fp8",
    "linear 4608 to 1152, fp8",
    "linear 5120 to 1280, residual, fp8",
    "linear 320 to 320, int8",
    "linear 320 to 960, int8",
    "linear 640 to 640, int8",
    "linear 1152 to 1152, int8",
    "linear 1152 to 4608, int8",
    "linear 1280 to 320, residual, int8",
    "linear 1280 to 1280, int8",
    "linear 2560 to 640, residual, int8",
    "linear 4608 to 1152, int8",
    "linear 5120 to 1280, residual, int8",
    "swiglu 1152 to 6144, int8",
))  # fmt: skip
# Of CONFIRMED, the plans that failed in a version of Triton or were slower there than what runs in their place.
DISABLED: dict[tuple[int, int], frozenset[str]] = {}


def is_confirmed(plan: str | None) -> bool:
    """Whether the plan is taken in the version of Triton that is installed, where nothing else is in its way."""
    version = known_version()
    return plan in CONFIRMED and (version is None or plan not in DISABLED.get(version, ()))


def obstacle(device: torch.device) -> str | None:
    """Say why kernels in Gluon are not launched there, if they are not."""
    if not is_sm_90(device):
        return "Gluon: the device is no sm_90"
    if known_version() is None and verdict.reading(device).verdict is None:
        return f"Gluon: not known to work in triton {triton.__version__}"
    return None


def known_version() -> tuple[int, int] | None:
    """The version of Triton that is installed, where the kernels in Gluon are known to work in it."""
    return next((version for version in VERSIONS if triton.__version__.startswith("{}.{}.".format(*version))), None)


def descriptor(tensor: Tensor, block: list[int], *, shape: list[int] | None = None, strides: list[int] | None = None):
    """A tensor descriptor for a kernel in Gluon: the tensor, or another view of its memory, in blocks of this shape.

    Outside the tensor are zeros; nothing is written there.
    """
    from triton.experimental.gluon import language as gl  # absent where triton is
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = gl.float8e4nv if tensor.dtype == FP8 else getattr(gl, str(tensor.dtype).removeprefix("torch."))
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(tensor, shape or list(tensor.shape), strides or list(tensor.stride()), block, layout)
