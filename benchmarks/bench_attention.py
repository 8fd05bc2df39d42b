"""Attention in bfloat16: ours, torch's SDPA eager and compiled, each time beside its error and its memory.

    python benchmarks/bench_attention.py [--save [DIR]]

q, k and v are views into a fused projection, the output is (N, L, heads * d) contiguous, for all. "kernel" is ours
also where the operation leaves the shape to the library; `share` is that of the measured bf16 matrix product.
"""

import sys
from typing import Any

import torch
from harness import DEVICE, ceilings, measure, report
from shapes import ATTENTIONS
from torch import Tensor

from fastdiff.kernels.attention import attention, flash_attention


def main() -> None:
    if DEVICE.type != "cuda":
        sys.exit("bench_attention needs a GPU: elsewhere the operation is torch's own function")
    tflops = ceilings()["matmul_bf16_tflops"]
    report("attention", [row(name, tflops) for name in ATTENTIONS])


@torch.inference_mode()
def row(name: str, ceiling: float) -> dict[str, Any]:
    n, queries, keys, heads, width = ATTENTIONS[name]
    q = torch.randn(n, queries, 3 * heads * width, device=DEVICE, dtype=torch.bfloat16)
    kv = q if keys == queries else torch.randn(n, keys, 3 * heads * width, device=DEVICE, dtype=torch.bfloat16)
    arguments = q.chunk(3, dim=-1)[0], *kv.chunk(3, dim=-1)[1:]
    compiled = torch.compile(attention.reference, dynamic=False)
    calls = {
        "fastdiff": lambda: attention(*arguments, heads=heads),
        "kernel": lambda: flash_attention(*arguments, heads, False),
        "eager": lambda: attention.reference(*arguments, heads=heads),
        "compile": lambda: compiled(*arguments, heads=heads),
    }
    truth = exact(*arguments, heads)
    errors = {who: (call()[:1].float() - truth).abs().max().item() for who, call in calls.items()}
    peak = peak_bytes(calls["fastdiff"]) - n * queries * heads * width * q.element_size()
    times = measure(calls)
    rate = 4 * n * heads * queries * keys * width / times["fastdiff"] / 1e9
    return {
        "workload": name,
        **{f"{who}_us": 1e3 * milliseconds for who, milliseconds in times.items()},
        "tflops": rate,
        "share": rate / ceiling,
        "max_abs_err": errors["fastdiff"],
        "kernel_max_abs_err": errors["kernel"],
        "eager_max_abs_err": errors["eager"],
        "extra_bytes": peak,
    }


def exact(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """The first picture in float32, 1024 queries at a time."""
    q, k, v = (tensor[0].float().unflatten(-1, (heads, -1)).transpose(0, 1) for tensor in (q, k, v))
    parts = [(part @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v for part in q.split(1024, dim=1)]
    return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)[None]


def peak_bytes(call) -> int:
    """Allocated by a call beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
