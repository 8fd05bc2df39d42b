"""Products in fp8 on sm_90, beside bfloat16's: the kernel made for it, that of all cards, and the rounding of tokens.

    python benchmarks/bench_linear_fp8.py [PLAN ...] [--save [DIR]]

`bf16` is what the operation takes in bfloat16. `fp8_kernel` and `fp8_hopper` have tokens that are in fp8 already,
which `to_fp8` makes; both must have the same bits. In the end are the plans whose `fp8_hopper` was the faster at all
numbers of tokens that it takes, as `host/hopper/gluon.py` lists them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from harness import chosen, measure, needs_gpu, print_confirmed, randn, report

from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host.dispatch import Operation
from fastdiff.kernels.host.hopper import linear as on_hopper
from fastdiff.kernels.host.weights import FP8, quantise
from fastdiff.kernels.linear import linear
from fastdiff.kernels.swiglu import swiglu
from fastdiff.kernels.to_fp8 import to_fp8

TOKENS = (512, 2048, 8192)
# plan -> operation, input channels, rows of the weight, options of linear; option "residual" is a tensor of its size
PLANS: dict[str, tuple[Operation, int, int, dict[str, Any]]] = {
    **{f"linear {a} to {b}, fp8": (linear, a, b, {}) for a, b in (
        (320, 320), (320, 960), (640, 640), (640, 1920), (1280, 1280), (1280, 3840), (512, 1536), (1152, 1152),
        (1152, 3456), (4608, 1152),
    )},
    "linear 1152 to 4608, fp8": (linear, 1152, 4608, {"activation": "gelu_tanh"}),
    **{f"linear {4 * a} to {a}, residual, fp8": (linear, 4 * a, a, {"residual": True}) for a in (320, 640, 1280)},
    **{f"geglu {a} to {8 * a}, fp8": (geglu, a, 8 * a, {}) for a in (320, 640, 1280)},
    "swiglu 1152 to 6144, fp8": (swiglu, 1152, 6144, {}),
}  # fmt: skip


def main() -> None:
    needs_gpu()
    gains: dict[str, list[float]] = {}

    def rows() -> Iterator[dict[str, Any]]:
        for name in chosen(PLANS):
            for tokens in TOKENS:
                made = row(name, tokens)
                if "fp8_hopper_ms" in made:
                    gains.setdefault(name, []).append(made["fp8_kernel_ms"] / made["fp8_hopper_ms"])
                yield made

    report("linear_fp8", rows())
    print_confirmed(gains)


@torch.inference_mode()
def row(name: str, tokens: int) -> dict[str, Any]:
    """Times of a plan at so many tokens of one picture; no `fp8_hopper` where its kernel leaves them to that of all."""
    operation, channels, rows, options = PLANS[name]
    x, weight, bias = randn(1, tokens, channels), randn(rows, channels) * channels**-0.5, randn(rows)
    options = options | ({"residual": randn(1, tokens, rows)} if "residual" in options else {})
    made, (scaled,) = quantise(weight, FP8), to_fp8(x)
    calls = {
        "bf16": partial(operation, x, weight, bias, **options),
        "fp8_kernel": partial(operation.kernel, scaled, made, bias, **options),
        "to_fp8": partial(to_fp8, x),
    }
    tiles = on_hopper.tiles_of(tokens, made, dual=operation is not linear)
    if tiles is not None and operation.parse(scaled, made, bias, **options).hopper_obstacle() is None:
        calls["fp8_hopper"] = partial(operation.hopper, scaled, made, bias, **options)
        check(name, calls["fp8_hopper"](), calls["fp8_kernel"]())
    times = measure(calls, seconds=0.03)
    fastest = times.get("fp8_hopper", times["fp8_kernel"])
    return {
        "workload": f"{name}, {tokens}",
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "fp8_tflops": 2 * tokens * rows * channels / fastest / 1e9,
        "tile": "" if tiles is None else "{} + {}".format(*tiles.parts),
    }


def check(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise ArithmeticError unless both kernels have the same bits."""
    if not torch.equal(ours, expected):
        raise ArithmeticError(f"{name}: {len(ours[0])} tokens have not the bits of the kernel of all cards")


if __name__ == "__main__":
    main()
