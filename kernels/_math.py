"""Device functions that several kernels share."""

from fastdiff.kernels._triton import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation named `ACTIVATION` of x, float32; the names of `group_norm.ACTIVATIONS`."""
    if ACTIVATION == "silu":
        # exp2 is one instruction, exp five; e^-x may be infinite, then x / (1 + e^-x) is -0
        x = x / (1 + tl.exp2(x * -LOG2_E))
    elif ACTIVATION == "mish":
        # x tanh(log(1 + e^x)) without the logarithm; from 20 on it is x, and e^x stays finite
        e = tl.exp2(tl.minimum(x, 20.0) * LOG2_E)
        x = x * (e * (e + 2) / (e * (e + 2) + 2))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(ACTIVATION == "none", "unknown activation")
    return x
