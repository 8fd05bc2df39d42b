"""Every kernel compiles for every card without one, and fits its shared memory: the tiles that the wrappers choose.

A case is a call of an operation on meta tensors, whose launches are compiled instead of run.
"""

import os

import pytest
import torch

from fastdiff.kernels import _launch
from fastdiff.kernels.conv2d import conv2d

pytest.importorskip("triton", reason="no Triton here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no compiler", allow_module_level=True)

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes of a program, by compute capability
MULTIPROCESSORS = {80: 108, 89: 128, 90: 132}
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32",
}  # fmt: skip


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def convolution(n, height, channels, out_channels, kernel=3, dtype=torch.bfloat16, **options):
    """A call of conv2d; `channels` is a pair for a skip connection."""
    channels = channels if isinstance(channels, tuple) else (channels,)
    parts = tuple(meta(n, height, height, c, dtype=dtype) for c in channels)
    weight = meta(out_channels, sum(channels), kernel, kernel, dtype=dtype)
    weight = weight.contiguous(memory_format=torch.channels_last)
    options = {"padding": kernel // 2, **options}
    return lambda: conv2d.triton(
        parts if len(parts) > 1 else parts[0], weight, meta(out_channels, dtype=dtype), moments=True, **options
    )


CASES = {
    "conv2d-N8-C128-H256-residual": convolution(8, 256, 128, 128, residual=meta(8, 256, 256, 128)),
    "conv2d-N8-C256-H64-temb": convolution(8, 64, 256, 256, temb=meta(8, 256)),
    "conv2d-N1-C128-H32-small-batch": convolution(1, 32, 128, 128),
    "conv2d-N1-C256-H16-spread-chunks": convolution(1, 16, 256, 256),
    "conv2d-N64-C256-H8-all-chunks": convolution(64, 8, 256, 256),
    "conv2d-N8-C256-H64-down": convolution(8, 64, 256, 256, stride=2, padding=(0, 1, 0, 1)),
    "conv2d-N8-C256-H32-up": convolution(8, 32, 256, 256, upsample=True),
    "conv2d-N8-C512+256-H32-shortcut": convolution(8, 32, (512, 256), 256, kernel=1),
    "conv2d-N8-C3-H256-first": convolution(8, 256, 3, 128),
    "conv2d-N8-C128-H256-last": convolution(8, 256, 128, 3),
    "conv2d-N2-C36-H7-odd": convolution(2, 7, 36, 36),
    "conv2d-N2-C64-H64-fp16": convolution(2, 64, 64, 64, dtype=torch.float16),
    "conv2d-N2-C64-H64-fp32": convolution(2, 64, 64, 64, dtype=torch.float32),
    "conv2d-N1-C512-H16-fp32": convolution(1, 16, 512, 512, dtype=torch.float32),
}


@pytest.fixture
def launches(monkeypatch):
    """launches(call, capability): the kernels that a call would launch on such a card, each with its arguments."""
    from triton.runtime.jit import JITFunction

    def record(call, capability):
        found = []
        monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: found.append((kernel, args, kwargs)))
        monkeypatch.setattr(_launch, "INTERPRETER_CAPABILITY", divmod(capability, 10))
        monkeypatch.setattr(_launch, "INTERPRETER_MULTIPROCESSORS", MULTIPROCESSORS[capability])
        assert call() is not None
        return found

    return record


def compile_launch(kernel, args, kwargs, capability):
    """The variant of `kernel` that Triton compiles for these arguments: its types, constants and alignments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for parameter in kernel.params:
        value = values.pop(parameter.name, parameter.default)
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(parameter.num,)] = "constexpr", value
            continue
        if isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name], aligned = f"*{TYPES[value.dtype]}", True
        elif isinstance(value, int):
            signature[parameter.name], aligned = "i32" if value < 2**31 else "i64", value % 16 == 0
        else:
            signature[parameter.name], aligned = "fp32", False
        if specialised and aligned:
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    options = {name: values[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", SHARED_MEMORY, ids=lambda capability: f"sm_{capability}")
@pytest.mark.parametrize("case", CASES)
def test_compiles_within_shared_memory(case, capability, launches):
    found = launches(CASES[case], capability)
    assert found
    for kernel, args, kwargs in found:
        metadata = compile_launch(kernel, args, kwargs, capability).metadata
        assert metadata.shared <= SHARED_MEMORY[capability], f"{metadata.name} takes {metadata.shared} bytes"
