"""Products with 8-bit weights: the sm_90 kernel ("hopper"), the generic kernel ("kernel"), and bf16.

    python benchmarks/kernels/quantised/bench_linear_8bit.py [PLAN ...] [--save [DIR]]

`bf16` is the operation's own choice in bfloat16. In fp8 the tokens are quantised by `to_fp8` beforehand, which is also
timed alone; an int8 product starts with `from_int8`. Both kernels must give the same bits. At the end, prints the plans
whose sm_90 kernel was faster at every number of tokens that it accepts, in the format of `plans/choices.py`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.harness.operations import print_confirmed, randn
from benchmarks.harness.reports import chosen, needs_gpu, report
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host.weights import FP8, INT8, quantise
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import hopper_linear as on_hopper
from fastdiff.kernels.plans.choices import hopper_obstacle
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.kernels.swiglu import swiglu
from fastdiff.kernels.to_fp8 import to_fp8
from fastdiff.tuning.timing import measure

TOKENS = (512, 2048, 8192)
# plan -> operation, input channels, rows of the weight, options of linear; "residual" stands for a tensor of the
# output's size; PLANS adds the weight's dtype
PRODUCTS: dict[str, tuple[Operation, int, int, dict[str, Any]]] = {
    **{f"linear {a} to {b}": (linear, a, b, {}) for a, b in (
        (320, 320), (320, 960), (640, 640), (640, 1920), (1280, 1280), (1280, 3840), (512, 1536), (1152, 1152),
        (1152, 3456), (4608, 1152),
    )},
    "linear 1152 to 4608": (linear, 1152, 4608, {"activation": "gelu_tanh"}),
    **{f"linear {4 * a} to {a}, residual": (linear, 4 * a, a, {"residual": True}) for a in (320, 640, 1280)},
    **{f"geglu {a} to {8 * a}": (geglu, a, 8 * a, {}) for a in (320, 640, 1280)},
    "swiglu 1152 to 6144": (swiglu, 1152, 6144, {}),
}  # fmt: skip
PLANS = {
    f"{name}, {precision}": (*product, dtype)
    for precision, dtype in (("fp8", FP8), ("int8", INT8))
    for name, product in PRODUCTS.items()
}


def main() -> None:
    needs_gpu()
    gains: dict[str, list[float]] = {}

    def rows() -> Iterator[dict[str, Any]]:
        for name in chosen(PLANS):
            for tokens in TOKENS:
                made = row(name, tokens)
                if "hopper_ms" in made:
                    gains.setdefault(name, []).append(made["kernel_ms"] / made["hopper_ms"])
                yield made

    report("linear_8bit", rows())
    print_confirmed(gains)


@torch.inference_mode()
def row(name: str, tokens: int) -> dict[str, Any]:
    """Return a plan's times for one picture of `tokens` tokens, without `hopper` if its kernel needs more tokens."""
    operation, channels, rows, options, dtype = PLANS[name]
    x, weight, bias = randn(1, tokens, channels), randn(rows, channels) * channels**-0.5, randn(rows)
    options = options | ({"residual": randn(1, tokens, rows)} if "residual" in options else {})
    calls = {"bf16": partial(operation, x, weight, bias, **options)}
    made, given = quantise(weight, dtype), x
    if dtype == FP8:
        calls["to_fp8"], (given,) = partial(to_fp8, x), to_fp8(x)
    calls["kernel"] = partial(operation.kernel, given, made, bias, **options)
    dual = operation is not linear
    busy = on_hopper.fills_card(tokens, made, dual=dual)
    if busy and hopper_obstacle(operation.parse(given, made, bias, **options)) is None:
        calls["hopper"] = partial(operation.hopper, given, made, bias, **options)
        check(name, calls["hopper"](), calls["kernel"]())
    times = measure(calls, seconds=0.03)
    fastest = times.get("hopper", times["kernel"])
    return {
        "workload": f"{name}, {tokens}",
        **{f"{who}_ms": milliseconds for who, milliseconds in times.items()},
        "tflops": 2 * tokens * rows * channels / fastest / 1e9,
        "tile": "{} + {}".format(*on_hopper.tiles_of(tokens, made, dual=dual).parts) if busy else "",
    }


def invocation(name: str, tokens: int) -> tuple[Operation, tuple, dict[str, Any]]:
    """Return a plan's operation, and its arguments and options for one picture of `tokens` tokens."""
    operation, channels, rows, options, dtype = PLANS[name]
    x, weight = randn(1, tokens, channels), quantise(randn(rows, channels) * channels**-0.5, dtype)
    given = to_fp8(x)[0] if dtype == FP8 else x
    more = {"residual": randn(1, tokens, rows)} if "residual" in options else {}
    return operation, (given, weight, randn(rows)), options | more


def check(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise ArithmeticError unless both kernels give the same bits."""
    if not torch.equal(ours, expected):
        raise ArithmeticError(f"{name}: {len(ours[0])} tokens: the bits differ from the generic kernel's")


if __name__ == "__main__":
    main()
