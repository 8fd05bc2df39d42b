"""Device functions shared by several kernels."""

from fastdiff.kernels.device.language import cuda, target_info, tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
FEW_PROGRAMS = tl.constexpr(132)  # one for each multiprocessor of an H100 or H200; chosen, not measured


@triton.jit
def prefetch(ptr, elements):
    """Prefetch a 16-bit or 8-bit tensor that no kernel writes into the L2, before `await_inputs`.

    If few programs run, each would wait for memory line by line, so each prefetches its share of the whole tensor.
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
    """Wait for the kernel that computes the inputs; every kernel calls this before it reads them.

    With programmatic dependent launch, `launch` lets a kernel start before the previous one ends, so everything but the
    wait for memory happens early. A grid of few programs leaves room for the next kernel and lets it start at once; a
    larger grid would be slowed down by it.
    """
    if target_info.cuda_capability_geq(9, 0):
        cuda.gdc_wait()
        if tl.num_programs(0) * tl.num_programs(1) <= FEW_PROGRAMS:
            cuda.gdc_launch_dependents()


@triton.jit
def tree_sum(x, GROUPS: tl.constexpr, LENGTH: tl.constexpr, BN: tl.constexpr):
    """Sum (GROUPS * LENGTH, BN) to (GROUPS, BN) by halving, so that the order does not depend on the layout of x."""
    half: tl.constexpr = LENGTH // 2
    if LENGTH == 1:
        return x.reshape(GROUPS, BN)
    else:
        return tree_sum(tl.sum(x.reshape(GROUPS, 2, half, BN), axis=1), GROUPS, half, BN)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr = False):
    """Apply an activation to x, float32; the names are those of `group_norm.ACTIVATIONS` and `linear.ACTIVATIONS`.

    EXACT: round SiLU's division once, not twice; for a float32 result of a single sum.
    """
    if ACTIVATION == "silu":
        # exp2 is one instruction, exp five. e^-x may be infinite; then x / (1 + e^-x) is -0
        divisor = 1 + tl.exp2(x * -LOG2_E)
        x = tl.div_rn(x, divisor) if EXACT else x / divisor
    elif ACTIVATION == "mish":
        # x tanh(log(1 + e^x)) without the logarithm. From 20 on the result is x; the clamp keeps e^x finite
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
