"""SwiGLU as one product in bfloat16: ours, eager and compiled torch, each time beside its error.

python benchmarks/bench_swiglu.py [--save [DIR]]
"""

from typing import Any

import torch
from harness import DEVICE, ceilings, compiled, kernel_row, needs_gpu, report
from shapes import SWIGLUS

from fastdiff.kernels.swiglu import swiglu


def main() -> None:
    needs_gpu("torch's own functions")
    torch.backends.cuda.matmul.allow_tf32 = False  # of the truth
    peak = ceilings()["matmul_bf16_tflops"]
    report("swiglu", (row(name, peak) for name in SWIGLUS))


@torch.inference_mode()
def row(name: str, peak_tflops: float) -> dict[str, Any]:
    n, tokens, channels, out_channels = SWIGLUS[name]
    x = torch.randn(n, tokens, channels, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(2 * out_channels, channels, device=DEVICE, dtype=torch.bfloat16) * channels**-0.5
    plain = compiled(swiglu.reference)
    calls = {
        "fastdiff": lambda: swiglu(x, weight),
        "eager": lambda: swiglu.reference(x, weight),
        "compile": lambda: plain(x, weight),
    }
    truth = swiglu.reference(x.float(), weight.float())
    return kernel_row(name, calls, truth, flop=4 * truth.numel() * channels, ceiling=peak_tflops)


if __name__ == "__main__":
    main()
