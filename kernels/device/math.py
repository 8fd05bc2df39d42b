"""Device functions that several kernels share."""

from fastdiff.kernels.device.language import cuda, target_info, tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
FEW_PROGRAMS = tl.constexpr(132)  # one for each multiprocessor of an H100 or H200; chosen, not measured


@triton.jit
def prefetch(ptr, elements):
    """Ask for a tensor that no kernel writes, of 16-bit or 8-bit elements, before `await_inputs`.

    Where few programs run they would wait for memory line by line: each asks for its share of the whole.
    """
    programs = tl.num_programs(0) * tl.num_programs(1)
    if target_info.cuda_capability_geq(9, 0) and programs <= FEW_PROGRAMS:
        LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        for first in range(program * 128, tl.cdiv(elements, LINE), programs * 128):
            line = tl.minimum(first + tl.arange(0, 128), (elements - 1) // LINE)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr + line * LINE], tl.int32, False, 1
            )


@triton.jit
def await_inputs():
    """The first line of every kernel: `launch` lets it begin before the kernel that makes its inputs has ended.

    Programmatic dependent launch: all but the wait for memory is done early. Few programs leave room for the next
    kernel's, so they let these begin at once; many would be held up by them.
    """
    if target_info.cuda_capability_geq(9, 0):
        cuda.gdc_wait()
        if tl.num_programs(0) * tl.num_programs(1) <= FEW_PROGRAMS:
            cuda.gdc_launch_dependents()


@triton.jit
def tree_sum(x, GROUPS: tl.constexpr, LENGTH: tl.constexpr, BN: tl.constexpr):
    """(GROUPS * LENGTH, BN) -> (GROUPS, BN), halves onto halves: no layout of x changes the order of the sum."""
    half: tl.constexpr = LENGTH // 2
    if LENGTH == 1:
        return x.reshape(GROUPS, BN)
    else:
        return tree_sum(tl.sum(x.reshape(GROUPS, 2, half, BN), axis=1), GROUPS, half, BN)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr = False):
    """The activation named `ACTIVATION` of x, float32; the names of `group_norm.ACTIVATIONS` and `linear`'s.

    EXACT: SiLU's division is rounded once, not twice; for a float32 result of one sum.
    """
    if ACTIVATION == "silu":
        # exp2 is one instruction, exp five; e^-x may be infinite, then x / (1 + e^-x) is -0
        divisor = 1 + tl.exp2(x * -LOG2_E)
        x = tl.div_rn(x, divisor) if EXACT else x / divisor
    elif ACTIVATION == "mish":
        # x tanh(log(1 + e^x)) without the logarithm; from 20 on it is x, and e^x stays finite
        e = tl.exp2(tl.minimum(x, 20.0) * LOG2_E)
        x = x * (e * (e + 2) / (e * (e + 2) + 2))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(u)) is 1 / (1 + e^-2u)
        u = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
        x = x / (1 + tl.exp2(u * (-2 * LOG2_E)))
    elif ACTIVATION == "quick_gelu":
        x = x / (1 + tl.exp2(x * (-1.702 * LOG2_E)))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(ACTIVATION == "none", "unknown activation")
    return x
