"""Kernels compiled without a card: what a launch would have Triton make, and whether it does."""

import math
import re
from subprocess import run
from tempfile import NamedTemporaryFile

import torch

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes of a program, by compute capability
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


def variant(kernel, args, kwargs) -> tuple[dict, dict, dict, dict]:
    """Types, constants and alignments of these arguments, which decide the code that Triton makes of `kernel`."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}

    def kind(value, place, specialised):
        """The type of an argument, or those of a tuple's elements; its constant or its alignment go to its place."""
        if isinstance(value, tuple):
            return tuple(kind(item, (*place, i), specialised) for i, item in enumerate(value))
        name, aligned = type_of(value)
        if value is None or (specialised and isinstance(value, int) and value == 1):
            constants[place] = value
            return "constexpr"
        if specialised and aligned:
            attributes[place] = [["tt.divisibility", 16]]
        return name

    for parameter in kernel.params:
        value = values.pop(parameter.name, parameter.default)
        if parameter.is_constexpr:
            signature[parameter.name], constants[(parameter.num,)] = "constexpr", value
        else:
            signature[parameter.name] = kind(value, (parameter.num,), not parameter.do_not_specialize)
    names = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
    options = {name: values[name] for name in names if name in values}
    return signature, constants, attributes, options


def type_of(value) -> tuple[str, bool]:
    """Triton's name for the type of an argument, and whether it is a multiple of 16."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>", False
    if isinstance(value, GluonDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>", False
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", True
    if isinstance(value, int):
        return "i32" if value < 2**31 else "i64", value % 16 == 0
    return "fp32", False


def assert_compiles(found, capability, *, spills=math.inf):
    """Every variant among the launches `found`, once; `spills`: bytes that a thread may keep beside its registers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    assert found
    variants = [(kernel, variant(kernel, args, kwargs)) for kernel, args, kwargs in found]
    for kernel, (*code, options) in {repr(each): each for each in variants}.values():
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        compiled = triton.compile(source(kernel, *code), GPUTarget("cuda", capability, 32), options)
        name, shared = compiled.metadata.name, compiled.metadata.shared
        assert shared <= SHARED_MEMORY[capability], f"{name} takes {shared} bytes"
        assert spills == math.inf or stack_bytes(compiled) <= spills, f"{name} keeps numbers in memory"
        if not kernel.is_gluon():  # which counts its buffers itself
            assert_no_buffer_is_filled_too_early(compiled.asm["ttgir"], options["num_stages"])


def stack_bytes(compiled) -> int:
    """Bytes of memory of a thread of a compiled kernel: what does not fit its registers."""
    import triton

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.findall(r"STACK:(\d+)", said.stdout)[0])


def assert_no_buffer_is_filled_too_early(code: str, num_stages: int) -> None:
    """A product that runs on while the next loads begin reads its tiles in place: they have a buffer for each stage."""
    buffers = dict(re.findall(r"(%\w+) = ttg\.memdesc_index .*?: !ttg\.memdesc<(\d+)x", code))
    views = dict(re.findall(r"(%\w+) = ttg\.memdesc_(?:trans|subslice) (%\w+)", code))
    for operands in re.findall(r"= ttng\.warp_group_dot (%\w+), (%\w+), .*isAsync = true", code):
        for tile in operands:
            while tile in views:
                tile = views[tile]
            assert int(buffers.get(tile, num_stages)) >= num_stages, f"{tile} of {num_stages} stages"
