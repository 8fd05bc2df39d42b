"""GroupNorm + SiLU in channels-last bfloat16: ours, eager and compiled torch; times and errors.

    python benchmarks/kernels/bench_group_norm.py [--save [DIR]]

"given" runs after a convolution that wrote its moments in tiles of 256 pixels: one read and one write of the tensor.
"alone" reads the tensor once more. `share` is the fraction of the copy rate on a tensor of 2 GB; it can exceed 1 for a
smaller tensor that is still in the L2 cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.operations import ceilings, compiled, kernel_row
from benchmarks.harness.reports import needs_gpu, report
from benchmarks.shapes import GROUP_NORMS
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.moments import Moments
from fastdiff.tuning.timing import DEVICE

GROUPS, EPS, TILE = 32, 1e-6, 256
PASSES = {"given": 2, "alone": 3}  # reads and writes of the tensor


def main() -> None:
    needs_gpu()
    copy = ceilings()["copy_tbps"]
    report("group_norm", (row for name in GROUP_NORMS for row in rows(name, copy)))


@torch.inference_mode()
def rows(name: str, copy_tbps: float) -> list[dict[str, Any]]:
    n, height, widths = GROUP_NORMS[name]
    shapes = [(n, height, height, width) for width in widths]
    parts = tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) + 0.5 for shape in shapes)
    weight, bias = torch.randn(2, sum(widths), device=DEVICE, dtype=torch.bfloat16)
    x = parts if len(parts) == 2 else parts[0]
    known = tuple(map(moments, parts))
    options = {"eps": EPS, "activation": "silu"}
    ours = {
        "given": lambda: group_norm(x, GROUPS, weight, bias, moments=known if len(parts) == 2 else known[0], **options),
        "alone": lambda: group_norm(x, GROUPS, weight, bias, **options),
    }
    fused = compiled(plain)
    torchs = {"eager": lambda: plain(parts, weight, bias), "compile": lambda: fused(parts, weight, bias)}
    truth = plain(tuple(part.float() for part in parts), weight.float(), bias.float())
    size = sum(part.nbytes for part in parts)
    return [
        kernel_row(f"{name}-{who}", {"fastdiff": call} | torchs, truth, moved=PASSES[who] * size, ceiling=copy_tbps)
        for who, call in ours.items()
    ]


def plain(parts: tuple[Tensor, ...], weight: Tensor, bias: Tensor) -> Tensor:
    x = torch.cat(parts, dim=-1) if len(parts) == 2 else parts[0]
    return F.silu(F.group_norm(x.permute(0, 3, 1, 2), GROUPS, weight, bias, EPS)).permute(0, 2, 3, 1)


def moments(x: Tensor) -> Moments:
    """Return the moments of x from a convolution with tiles of TILE pixels, which divide x's size or exceed it."""
    tiles = x.float().flatten(1, 2).unflatten(1, (-1, min(TILE, x.shape[1] * x.shape[2])))  # (N, tiles, pixels, C)
    mean = tiles.mean(dim=2)
    return Moments(mean, (tiles - mean[:, :, None]).square().sum(dim=2), TILE)


if __name__ == "__main__":
    main()
