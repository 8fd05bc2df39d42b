"""A DiT-XL/2 block in seven launches, and each fusion of a transformer against the same work unfused, in bfloat16.

    python benchmarks/kernels/bench_block.py [--save [DIR]]

`unfused` runs the fused step separately around our own kernels; `max_abs_diff` is its difference from the fused
result. `eager` and `compile` are torch alone. A block is timed in a chain of 28 blocks with separate weights, which no
cache holds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.operations import compiled, max_abs_err, randn
from benchmarks.harness.reports import needs_gpu, report
from fastdiff.kernels.attention import attention
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.kernels.swiglu import swiglu
from fastdiff.tuning.timing import measure

WIDTH, HEADS, TOKENS, BLOCKS = 1152, 16, 256, 28
EPS = 1e-6
OURS = (linear, layer_norm, attention)
TORCHS = tuple(operation.reference for operation in OURS)


def main() -> None:
    needs_gpu()
    report("block", (row for n in (2, 32) for row in (block_row(n), *fusion_rows(n))))


@torch.inference_mode()
def block_row(n: int) -> dict[str, Any]:
    start = randn(n, TOKENS, WIDTH), randn(n, TOKENS, WIDTH)
    table, blocks = randn(n, 6 * WIDTH), [weights() for _ in range(BLOCKS)]

    def chain(block: Callable) -> tuple[Tensor, Tensor]:
        stream = start
        for block_weights in blocks:
            stream = block(*stream, table, *block_weights)
        return stream

    by_torch = partial(block, TORCHS)
    makers: dict[str, Callable] = {"fastdiff": partial(block, OURS), "eager": by_torch, "compile": compiled(by_torch)}
    truth = by_torch(*(tensor.float() for tensor in (*start, table, *blocks[0])))[1]
    times = measure({who: partial(chain, one) for who, one in makers.items()})
    return {
        "workload": f"dit_b{n}-block",
        **{f"{who}_us": 1e3 * milliseconds / BLOCKS for who, milliseconds in times.items()},
        **{f"{who}_max_abs_err": max_abs_err(one(*start, table, *blocks[0])[1], truth) for who, one in makers.items()},
    }


def block(operations, x, branch, table, qkv, qkv_bias, out, out_bias, fc1, fc1_bias, fc2, fc2_bias):
    """Return x and the pending branch (not yet added to x) after a block of diffusers' DiTTransformer2DModel."""
    linear, layer_norm, attention = operations
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = table.chunk(6, dim=1)
    h, x = layer_norm(branch, eps=EPS, residual=x, gate=gate_mlp, scale=scale, shift=shift)
    h = attention(*linear(h, qkv, qkv_bias).chunk(3, dim=-1), heads=HEADS)
    h = linear(h, out, out_bias)
    h, x = layer_norm(h, eps=EPS, residual=x, gate=gate, scale=scale_mlp, shift=shift_mlp)
    return x, linear(linear(h, fc1, fc1_bias, activation="gelu_tanh"), fc2, fc2_bias)


@torch.inference_mode()
def fusion_rows(n: int) -> list[dict[str, Any]]:
    x, residual, hidden = randn(n, TOKENS, WIDTH), randn(n, TOKENS, WIDTH), randn(n, TOKENS, 4 * WIDTH)
    qkv, qkv_bias, *_, fc1, fc1_bias, fc2, fc2_bias = weights()
    gated = randn(2 * 3072, WIDTH) * WIDTH**-0.5
    shift, scale, gate = randn(n, 3 * WIDTH).chunk(3, dim=1)
    modulation = {"scale": scale, "shift": shift, "eps": EPS}
    parts = list(zip(qkv.chunk(3), qkv_bias.chunk(3), strict=True))
    q, k, v = linear(x, qkv, qkv_bias).chunk(3, dim=-1)

    def attention_unfused() -> Tensor:
        heads = [tensor.unflatten(-1, (HEADS, -1)).transpose(1, 2) for tensor in (q, k, v)]
        scores = (heads[0] @ heads[1].mT * (WIDTH // HEADS) ** -0.5).softmax(dim=-1)
        return (scores @ heads[2]).transpose(1, 2).flatten(2)

    def swiglu_unfused() -> Tensor:
        first, second = (linear(x, half) for half in gated.chunk(2))
        return F.silu(first) * second

    def norm_unfused() -> Tensor:
        y = layer_norm(torch.addcmul(residual, x, gate[:, None]), eps=EPS)
        return torch.addcmul(shift[:, None], y, 1 + scale[:, None])

    pairs = {
        "qkv": (lambda: linear(x, qkv, qkv_bias), lambda: [linear(x, *part) for part in parts]),
        "attention": (lambda: attention(q, k, v, heads=HEADS), attention_unfused),
        "linear-gelu": (
            lambda: linear(x, fc1, fc1_bias, activation="gelu_tanh"),
            lambda: F.gelu(linear(x, fc1, fc1_bias), approximate="tanh"),
        ),
        "linear-gate-residual": (
            lambda: linear(hidden, fc2, fc2_bias, gate=gate, residual=residual),
            lambda: torch.addcmul(residual, linear(hidden, fc2, fc2_bias), gate[:, None]),
        ),
        "gate-residual-norm-modulate": (
            lambda: layer_norm(x, residual=residual, gate=gate, **modulation),
            norm_unfused,
        ),
        "rms_norm-linear": (
            lambda: linear(x, qkv, rms_norm=(None, EPS)),
            lambda: linear(layer_norm(x, eps=EPS, rms=True), qkv),
        ),
        "swiglu": (lambda: swiglu(x, gated), swiglu_unfused),
    }
    return [fusion_row(f"dit_b{n}-{name}", *pair) for name, pair in pairs.items()]


def fusion_row(name: str, fused: Callable, unfused: Callable) -> dict[str, Any]:
    times = measure({"fastdiff": fused, "unfused": unfused})
    gain, error = times["unfused"] / times["fastdiff"], max_abs_err(joined(fused()), joined(unfused()).float())
    return {
        "workload": name,
        **{f"{who}_us": 1e3 * time for who, time in times.items()},
        "gain": gain,
        "max_abs_diff": error,
    }


def joined(output: Tensor | list[Tensor] | tuple[Tensor, Tensor]) -> Tensor:
    """Return one tensor per output: Q, K and V concatenated, and only the norm of a norm and its sum."""
    return torch.cat(output, dim=-1) if isinstance(output, list) else output[0] if isinstance(output, tuple) else output


def weights() -> tuple[Tensor, ...]:
    """Return random weights and biases of qkv, out, fc1 and fc2."""
    sizes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    return tuple(t for inner, outer in sizes for t in (randn(outer, inner) * inner**-0.5, randn(outer)))


if __name__ == "__main__":
    main()
