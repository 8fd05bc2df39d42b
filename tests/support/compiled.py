"""Compile the kernels of a launch without a GPU, and check the result."""

import math
import re
from contextlib import suppress
from subprocess import run
from tempfile import NamedTemporaryFile

import torch

# Of a card, by compute capability: the most shared memory of a program, in bytes. A multiprocessor has 1 KB more, and
# reserves 1 KB for each program.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 120: 48}  # most warps of a multiprocessor
REGISTERS = 65536  # of a multiprocessor of all these cards
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


def variant(kernel, args, kwargs) -> tuple[dict, dict, dict, dict]:
    """Return the signature, constants, attributes and options that decide the code that Triton compiles."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}

    def kind(value, place, specialised):
        """Return the type of an argument, or of each element of a tuple. Note its constant or its alignment."""
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
    """Return Triton's name for the type of an argument, and whether the argument is a multiple of 16."""
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


def variants(found) -> dict[str, tuple]:
    """Return the distinct variants among the launches `found`: (kernel, *the result of `variant`)."""
    each = [(kernel, *variant(kernel, args, kwargs)) for kernel, args, kwargs in found]
    return {repr(one): one for one in each}


def kinds_of(found) -> dict[tuple[str, str], int]:
    """Return (kernel name, number formats) -> the size of the largest tile, for the launches `found`.

    The code of a kernel differs between 16 and 32 bits, and if weights or all numbers have 8 bits. The size of a tile
    is its number of elements in shared memory: all stages of both operands of a product. Attention has one tile of Q.
    """
    sizes: dict[tuple[str, str], int] = {}
    for kernel, signature, constants, _, options in variants(found).values():
        types = set(re.findall(r"[*<](bf16|fp16|fp32|i8|fp8e4nv)", repr(signature)))
        wide, narrow = "16 bits" if types & {"bf16", "fp16"} else "fp32", types & {"i8", "fp8e4nv"}
        kind = kernel.fn.__name__, " ".join([wide, *narrow])
        tile = {kernel.arg_names[place[0]]: value for place, value in constants.items() if len(place) == 1}
        sizes[kind] = max(sizes.get(kind, 0), _size(tile, options["num_stages"]))
    return sizes


def _size(tile: dict, stages: int) -> int:
    pixels = tile.get("BI", 1) * tile.get("BH", 1) * tile.get("BW", 1)
    rows, columns = tile.get("BM", pixels), tile.get("BN", 0) * (2 if tile.get("DUAL") else 1)
    if "BK" in tile:
        return stages * (rows + columns) * tile["BK"]
    if "D1" in tile:
        return (rows + stages * columns) * (tile["D1"] + tile["D2"])
    return math.prod(size for name, size in tile.items() if re.fullmatch(r"B[A-Z0-9]?|BLOCK", name))


def assert_compiles(found, capability, *, spills=math.inf, warps=0, part=(0, 1)) -> list:
    """Compile every variant among the launches `found` once, and return the compiled kernels.

    spills: bytes that a thread may spill from its registers.
    warps: how many must fit a multiprocessor at a time, in whole programs.
    part: (i, n) compiles only the i-th of n parts of the variants.
    """
    assert found
    (first, parts), made = part, []
    for kernel, *code, options in list(variants(found).values())[first::parts]:
        compiled = _compile(kernel, *code, options, capability)
        name, shared = compiled.metadata.name, compiled.metadata.shared
        assert shared <= SHARED_MEMORY[capability], f"{name} takes {shared} bytes"
        assert spills == math.inf or stack_bytes(compiled) <= spills, f"{name} keeps numbers in memory"
        assert not warps or resident_warps(compiled, capability) >= warps, f"{name} leaves a multiprocessor idle"
        if not kernel.is_gluon():  # a Gluon kernel allocates its own buffers
            assert_no_buffer_is_filled_too_early(compiled.asm["ttgir"], options["num_stages"])
        made.append(compiled)
    return made


def assert_lowers(found, capability, monkeypatch) -> None:
    """Compile every variant among the launches `found` up to LLVM, which would take ten times as long as all before it.

    This checks the kernel's syntax, types and layouts.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    class Reached(Exception):
        pass

    def end(*args, **kwargs):
        raise Reached

    assert found
    monkeypatch.setattr(CUDABackend, "make_llir", end)
    for kernel, *code, options in variants(found).values():
        with suppress(Reached):  # not raised if the kernel is in Triton's cache
            _compile(kernel, *code, options, capability)


def _compile(kernel, signature, constants, attributes, options, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    source = GluonASTSource if kernel.is_gluon() else ASTSource
    code = source(kernel, signature, constants, attributes)
    return triton.compile(code, GPUTarget("cuda", capability, 32), options)


def resident_warps(compiled, capability) -> int:
    """Return how many warps of a compiled kernel a multiprocessor holds at a time: an estimate by the compiler."""
    warps, registers = compiled.metadata.num_warps, -(-usage(compiled, "REG") // 8) * 8  # given out in eights
    by_memory = (SHARED_MEMORY[capability] + 1024) // (compiled.metadata.shared + 1024)
    return warps * min(REGISTERS // (32 * warps * registers), by_memory, WARPS[capability] // warps)


def stack_bytes(compiled) -> int:
    """Return the stack of a thread of a compiled kernel in bytes: what it spills from its registers."""
    return usage(compiled, "STACK")


def usage(compiled, name: str) -> int:
    """Return a number that the assembler reports about a compiled kernel: REG, the registers of a thread, or STACK."""
    import triton

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.findall(rf"{name}:(\d+)", said.stdout)[0])


def assert_no_buffer_is_filled_too_early(code: str, num_stages: int) -> None:
    """Assert that the operands of each asynchronous product have a buffer for each stage.

    Such a product still reads its tiles while the next loads begin.
    """
    buffers = dict(re.findall(r"(%\w+) = ttg\.memdesc_index .*?: !ttg\.memdesc<(\d+)x", code))
    views = dict(re.findall(r"(%\w+) = ttg\.memdesc_(?:trans|subslice) (%\w+)", code))
    for operands in re.findall(r"= ttng\.warp_group_dot (%\w+), (%\w+), .*isAsync = true", code):
        for tile in operands:
            while tile in views:
                tile = views[tile]
            assert int(buffers.get(tile, num_stages)) >= num_stages, f"{tile} of {num_stages} stages"
