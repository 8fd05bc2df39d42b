"""Attention in bfloat16: ours, torch's SDPA eager and compiled, each time beside its error and its memory.

    python benchmarks/bench_attention.py [--save [DIR]]

q, k and v are views into a fused projection, the output is (N, L, heads * d) contiguous, for all. "kernel" is ours
also where the operation leaves the shape to the library; `share` is that of the measured bf16 matrix product;
`extra_bytes` is what a call allocates beyond inputs and output.
"""

from typing import Any

import torch
from harness import ceilings, kernel_row, needs_gpu, peak_bytes, randn, report, ways
from shapes import ATTENTIONS
from torch import Tensor

from fastdiff.kernels.attention import attention


def main() -> None:
    needs_gpu()
    tflops = ceilings()["matmul_bf16_tflops"]
    report("attention", (row(name, tflops) for name in ATTENTIONS))


@torch.inference_mode()
def row(name: str, ceiling: float) -> dict[str, Any]:
    n, queries, keys, heads, width = ATTENTIONS[name]
    q = randn(n, queries, 3 * heads * width)
    kv = q if keys == queries else randn(n, keys, 3 * heads * width)
    arguments = q.chunk(3, dim=-1)[0], *kv.chunk(3, dim=-1)[1:]
    calls = ways(attention, *arguments, heads=heads) | {"kernel": lambda: attention.kernel(*arguments, heads=heads)}
    flop = 4 * n * heads * queries * keys * width
    measured = kernel_row(name, calls, exact(arguments, heads), flop=flop, ceiling=ceiling)
    output_bytes = n * queries * heads * width * q.element_size()
    kernel_bytes = peak_bytes(calls["kernel"])
    return measured | {
        "extra_bytes": measured["peak_bytes"] - output_bytes,
        "kernel_extra_bytes": kernel_bytes - output_bytes,
    }


def exact(qkv: tuple[Tensor, ...], heads: int) -> Tensor:
    """The first picture in float32, 1024 queries at a time."""
    q, k, v = (tensor[0].float().unflatten(-1, (heads, -1)).transpose(0, 1) for tensor in qkv)
    parts = [(part @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v for part in q.split(1024, dim=1)]
    return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)[None]


if __name__ == "__main__":
    main()
