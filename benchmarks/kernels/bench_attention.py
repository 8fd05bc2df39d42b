"""Attention in bfloat16: ours against torch's SDPA eager and compiled; times, errors and memory.

    python benchmarks/kernels/bench_attention.py [WORKLOAD ...] [--save [DIR]]

q, k and v are views into a fused projection, and the output is contiguous (N, L, heads * d), for every implementation.
"kernel" is the generic kernel, and "hopper" the sm_90 kernel, whichever of them the operation itself chooses; `plan` is
the sm_90 kernel's name in `plans/choices.py`. "cudnn" and "flash" are torch's SDPA with these backends. `share` is the
fraction of the measured rate of a bf16 matrix product; `extra_bytes` is what a call allocates besides its output.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.operations import ceilings, hopper_way, kernel_row, peak_bytes, randn, ways
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.shapes import ATTENTIONS
from fastdiff.kernels.attention import attention
from fastdiff.tuning.timing import DEVICE, Call


def main() -> None:
    needs_gpu()
    tflops = ceilings()["matmul_bf16_tflops"]
    report("attention", (row(name, tflops) for name in chosen(ATTENTIONS)))


@torch.inference_mode()
def row(name: str, ceiling: float) -> dict[str, Any]:
    n, queries, keys, heads, width, _ = ATTENTIONS[name]
    qkv, options = arguments(name)
    plan, hopper = hopper_way(attention, *qkv, **options)
    calls = ways(attention, *qkv, **options) | {"kernel": lambda: attention.kernel(*qkv, **options)}
    calls |= hopper | libraries(qkv, options)
    flop = 4 * n * heads * queries * keys * width // (2 if options.get("causal") else 1)
    measured = kernel_row(name, calls, exact(qkv, **options), flop=flop, ceiling=ceiling)
    output_bytes = n * queries * heads * width * qkv[0].element_size()
    kernel_bytes = peak_bytes(calls["kernel"])
    return measured | {
        "extra_bytes": measured["peak_bytes"] - output_bytes,
        "kernel_extra_bytes": kernel_bytes - output_bytes,
        "plan": plan,
    }


def arguments(name: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the arguments of attention for a workload."""
    n, queries, keys, heads, width, options = ATTENTIONS[name]
    options = {"heads": heads} | options
    columns = [heads * width] + [options.pop("key_heads", heads) * width] * 2
    q = randn(n, queries, sum(columns))
    kv = q if keys == queries else randn(n, keys, sum(columns))
    if "bias" in options:
        options["bias"] = randn(n, keys)
    if "lengths" in options:
        fewer = [options["lengths"]] + [0] * (n - 1)
        options["lengths"] = torch.tensor([keys - less for less in fewer], dtype=torch.int32, device=DEVICE)
    return (q.split(columns, dim=-1)[0], *kv.split(columns, dim=-1)[1:]), options


def libraries(qkv: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, Call]:
    """Return torch's SDPA with each of its two backends that accepts these arguments."""

    def by(backend: SDPBackend) -> Call:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return attention.reference(*qkv, **options)

        return call

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    calls = {name: by(backend) for name, backend in backends.items()} if DEVICE.type == "cuda" else {}
    return {name: call for name, call in calls.items() if runs(call)}


def runs(call: Call) -> bool:
    try:
        call()
    except RuntimeError:
        return False
    return True


def exact(
    qkv: tuple[Tensor, ...],
    heads: int,
    causal: bool = False,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the first picture's attention in float32, computed 1024 queries at a time."""
    width = qkv[0].shape[-1] // heads
    q, k, v = (tensor[0].float().unflatten(-1, (-1, width)).transpose(0, 1) for tensor in qkv)
    seen = len(k[0]) if lengths is None else int(lengths[0])
    k, v = (each[:, :seen].repeat_interleave(heads // len(each), dim=0) for each in (k, v))
    parts = []
    for first in range(0, q.shape[1], 1024):
        scores = q[:, first : first + 1024] @ k.mT / q.shape[-1] ** 0.5
        scores = scores if bias is None else scores + bias[0].float()
        if causal:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(first + 1), -torch.inf)
        parts.append(scores.softmax(dim=-1) @ v)
    return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)[None]


if __name__ == "__main__":
    main()
