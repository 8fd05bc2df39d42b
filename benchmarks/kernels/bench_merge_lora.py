"""Two LoRAs of rank 32 in float16, merged into bfloat16 weights of Stable Diffusion XL: ours and eager torch.

    python benchmarks/kernels/bench_merge_lora.py [WORKLOAD ...] [--save [DIR]]

A workload is a number of transformer blocks, with all their projections. `sdxl` has all blocks of the U-Net. `tbps`
counts each weight twice, as it is read and written. `share` is its fraction of the rate of a large copy.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.operations import ceilings, kernel_row, randn
from benchmarks.harness.reports import chosen, needs_gpu, report
from fastdiff.kernels.merge_lora import LowRank, merge_lora

RANK, FACTORS, TEXT = 32, (0.7, 0.4), 2048
WORKLOADS = {"C640": {640: 1}, "C1280": {1280: 1}, "sdxl": {640: 10, 1280: 60}}  # the number of blocks of each width


def main() -> None:
    needs_gpu()
    copy = ceilings()["copy_tbps"]
    report("merge_lora", (row(name, copy) for name in chosen(WORKLOADS)))


def shapes(blocks: dict[int, int]) -> list[tuple[int, int]]:
    """Return (rows, columns) of the projections of some transformer blocks."""
    found = []
    for width, count in blocks.items():
        found += [(width, width)] * (6 * count) + [(width, TEXT)] * (2 * count)  # of the attentions
        found += [(8 * width, width), (width, 4 * width)] * count
    return found


def random_change(rows: int, columns: int, factor: float) -> LowRank:
    return LowRank(randn(rows, RANK).half() / 10, randn(RANK, columns).half() / columns**0.5, factor)


@torch.inference_mode()
def row(name: str, copy_tbps: float) -> dict[str, Any]:
    loaded = [randn(*shape) for shape in shapes(WORKLOADS[name])]
    changes = [[random_change(*each.shape, factor) for factor in FACTORS] for each in loaded]
    targets = [torch.empty_like(each) for each in loaded]

    def merged(way: Any) -> Tensor:
        way(targets, loaded, changes)
        return targets[-1]

    truth = loaded[-1].double()
    for up, down, factor in changes[-1]:
        truth += factor * (up.double() @ down.double())
    calls = {"fastdiff": lambda: merged(merge_lora), "eager": lambda: merged(merge_lora.reference)}
    moved = sum(2 * each.nbytes for each in loaded)
    return kernel_row(name, calls, truth, moved=moved, ceiling=copy_tbps)


if __name__ == "__main__":
    main()
