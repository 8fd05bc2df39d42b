"""LayerNorm and RMSNorm with their fused steps in bfloat16: ours, eager and compiled torch.

    python benchmarks/kernels/bench_layer_norm.py [WORKLOAD ...] [--save [DIR]]

`tbps` counts each tensor of tokens once; `share` is its fraction of the rate of a large copy (small tensors stay in the
cache and exceed it).
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.operations import ceilings, in_float32, kernel_row, randn, ways
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.shapes import LAYER_NORMS
from fastdiff.kernels.layer_norm import layer_norm


def main() -> None:
    needs_gpu()
    copy = ceilings()["copy_tbps"]
    report("layer_norm", (row(name, copy) for name in chosen(LAYER_NORMS)))


@torch.inference_mode()
def row(name: str, copy_tbps: float) -> dict[str, Any]:
    x, options = arguments(name)
    added = "residual" in options
    truth = in_float32(layer_norm.reference, (x,), options)
    truth = truth[0] if added else truth
    return kernel_row(name, ways(layer_norm, x, **options), truth, moved=(2 + 2 * added) * x.nbytes, ceiling=copy_tbps)


def arguments(name: str) -> tuple[Tensor, dict[str, Any]]:
    """Return x and the options of layer_norm for a workload."""
    n, tokens, channels, given = LAYER_NORMS[name]
    names, columns = given.split(), randn(n, 6 * channels).chunk(6, dim=1)
    tensors = {"weight": randn(channels), "residual": randn(n, tokens, channels)}
    tensors |= {"gate": columns[0], "scale": columns[1], "shift": columns[2]}
    options: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in names}
    if "branch_norm" in names:
        options["branch_norm"] = (randn(channels), 1e-6)
    return randn(n, tokens, channels), options | {"eps": 1e-6, "rms": "rms" in names}


if __name__ == "__main__":
    main()
