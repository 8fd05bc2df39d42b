"""LayerNorm and RMSNorm with their fused steps in bfloat16: ours, eager and compiled torch.

    python benchmarks/kernels/bench_layer_norm.py [--save [DIR]]

`tbps` counts each tensor of tokens once; `share` is its fraction of the rate of a large copy (small tensors stay in the
cache and exceed it).
"""

from typing import Any

import torch

from benchmarks.harness.operations import ceilings, in_float32, kernel_row, randn, ways
from benchmarks.harness.reports import needs_gpu, report
from benchmarks.shapes import LAYER_NORMS
from fastdiff.kernels.layer_norm import layer_norm


def main() -> None:
    needs_gpu()
    copy = ceilings()["copy_tbps"]
    report("layer_norm", (row(name, copy) for name in LAYER_NORMS))


@torch.inference_mode()
def row(name: str, copy_tbps: float) -> dict[str, Any]:
    n, tokens, channels, added, modulated, rms = LAYER_NORMS[name]
    x = randn(n, tokens, channels)
    options: dict[str, Any] = {"eps": 1e-6, "rms": rms}
    if added:
        options["residual"] = randn(n, tokens, channels)
    if modulated:
        options["shift"], options["scale"], *_ = randn(n, 6 * channels).chunk(6, dim=1)
    truth = in_float32(layer_norm.reference, (x,), options)
    truth = truth[0] if added else truth
    return kernel_row(name, ways(layer_norm, x, **options), truth, moved=(2 + 2 * added) * x.nbytes, ceiling=copy_tbps)


if __name__ == "__main__":
    main()
