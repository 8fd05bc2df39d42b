"""Two LoRAs of rank 32 in float16, merged into bfloat16 weights of Stable Diffusion XL: ours and eager torch.

    python benchmarks/kernels/bench_merge_lora.py [WORKLOAD ...] [--save [DIR]]

A workload is a number of transformer blocks, with all their projections. `sdxl` has all blocks of the U-Net. A call is
not captured in a CUDA graph, so its time includes Python's.
"""

import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.harness.operations import max_abs_err, randn
from benchmarks.harness.reports import chosen, needs_gpu, report
from fastdiff.kernels.merge_lora import LowRank, merge_lora
from fastdiff.tuning.timing import seconds_each

RANK, FACTORS, TEXT = 32, (0.7, 0.4), 2048
WORKLOADS = {"C640": {640: 1}, "C1280": {1280: 1}, "sdxl": {640: 10, 1280: 60}}  # the number of blocks of each width


def main() -> None:
    needs_gpu()
    report("merge_lora", (row(name) for name in chosen(WORKLOADS)))


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
def row(name: str) -> dict[str, Any]:
    loaded = [randn(*shape) for shape in shapes(WORKLOADS[name])]
    changes = [[random_change(*each.shape, factor) for factor in FACTORS] for each in loaded]
    targets = [torch.empty_like(each) for each in loaded]
    truth = loaded[-1].double()
    for up, down, factor in changes[-1]:
        truth += factor * (up.double() @ down.double())
    found: dict[str, Any] = {"workload": name}
    for who, way in {"fastdiff": merge_lora, "eager": merge_lora.reference}.items():
        call = partial(way, targets, loaded, changes)
        targets[-1].fill_(torch.nan)
        call()
        found[f"{who}_max_abs_err"] = max_abs_err(targets[-1], truth)
        found[f"{who}_ms"] = 1e3 * statistics.median(seconds_each(call, 3) for _ in range(9))
    return found


if __name__ == "__main__":
    main()
