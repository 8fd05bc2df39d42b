"""Merge LoRAs into weights: W + sum of factor * up @ down, for many weights in one launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.launching import DTYPES, launch
from fastdiff.kernels.plans.dispatch import Operation

BM, BN, BK = 64, 128, 32  # the fastest of 7 for SDXL's weights and rank 32
FLAT: tuple[list[int], ...] = ([], [1, 1])  # what follows the rows and columns of a matrix, and of a 1x1 filter


class LowRank(NamedTuple):
    """A change of a weight: factor * up @ down."""

    up: Tensor  # (rows, rank)
    down: Tensor  # (rank, columns)
    factor: float


@dataclass(frozen=True, eq=False)
class MergeLoRACall(Call[None]):
    """Write W + sum of factor * up @ down over weights (Hu et al. 2021, arXiv 2106.09685).

    The sum is in float32, in the order of the changes, and is rounded once.

    Args:
        targets: what is written, each (rows, columns) or a 1x1 filter (rows, columns, 1, 1), contiguous: float32,
            float16 or bfloat16, the same for all.
        loaded: W of each target: its shape, dtype and device, contiguous.
        changes: of each target. All up and down have one dtype and are contiguous.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    targets: Sequence[Tensor]
    loaded: Sequence[Tensor]
    changes: Sequence[Sequence[LowRank]]

    @property
    def device(self) -> torch.device:
        return self.targets[0].device

    def check(self) -> None:
        if not self.targets or len({len(each) for each in (self.targets, self.loaded, self.changes)}) > 1:
            raise ValueError("targets: expected at least one, and as many loaded weights and lists of changes")
        dtype, device, factors = self.targets[0].dtype, self.device, self.factor_dtype
        for target, loaded, changes in zip(self.targets, self.loaded, self.changes, strict=True):
            rows, columns, *window = shape = target.shape
            if target.dtype != dtype or target.device != device or not target.is_contiguous() or window not in FLAT:
                raise ValueError(f"targets: expected contiguous matrices, {dtype}, got {_described(target)}")
            if loaded.dtype != dtype or loaded.device != device or loaded.shape != shape or not loaded.is_contiguous():
                raise ValueError(f"loaded: expected {_described(target)}, got {_described(loaded)}")
            for up, down, _ in changes:
                if up.shape != (rows, down.shape[0]) or down.shape[1:] != (columns,):
                    raise ValueError(f"changes: {_described(up)} @ {_described(down)} is no {_described(target)}")
                for each in (up, down):
                    if each.dtype != factors or each.device != device or not each.is_contiguous():
                        raise ValueError(f"changes: expected contiguous {factors} on {device}, got {_described(each)}")

    @property
    def factor_dtype(self) -> torch.dtype | None:
        """The dtype of up and down; None without any change."""
        return next((change.up.dtype for changes in self.changes for change in changes), None)

    def obstacle(self) -> str | None:
        dtypes = self.targets[0].dtype, self.factor_dtype
        return None if all(dtype in DTYPES for dtype in dtypes) else f"no kernel for {dtypes[0]} and {dtypes[1]}"

    def reference(self) -> None:
        for target, loaded, changes in zip(self.targets, self.loaded, self.changes, strict=True):
            total = torch.empty(target.shape[:2], dtype=torch.float32, device=target.device)
            for i, (up, down, factor) in enumerate(changes):
                total.addmm_(up.float(), down.float(), beta=min(i, 1), alpha=factor)
            torch.add(loaded, total.view(target.shape) if changes else 0, out=target)

    def kernel(self) -> None:
        from fastdiff.kernels.device.language import tl  # imports Triton
        from fastdiff.kernels.device.merge_lora import merge_lora_kernel

        kinds = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
        weights, changes, factors = self._tables()
        tiles = torch.tensor([-(-rows // BM) * -(-columns // BN) for _, _, rows, columns, *_ in weights])
        of = torch.repeat_interleave(torch.arange(len(tiles)), tiles)
        within = torch.arange(len(of)) - (tiles.cumsum(0) - tiles)[of]
        tables = [
            torch.tensor(weights),
            torch.tensor(changes),
            torch.tensor(factors, dtype=torch.float32),
            torch.stack([of, within], dim=1).int(),
        ]
        launch(
            merge_lora_kernel, (len(of),), *(table.to(self.device) for table in tables),
            WEIGHT=kinds[self.targets[0].dtype], FACTOR=kinds[self.factor_dtype or torch.float32],
            BM=BM, BN=BN, BK=BK, num_warps=4,
        )  # fmt: skip
        torch.autograd.graph.increment_version(self.targets)  # torch does not see what a kernel writes

    def _tables(self) -> tuple[list[list[int]], list[list[int]], list[float]]:
        """Return the rows for weights and for changes, and the changes' factors."""
        weights: list[list[int]] = []
        changes: list[list[int]] = []
        for target, loaded, its in zip(self.targets, self.loaded, self.changes, strict=True):
            first = len(changes)
            changes += [[up.data_ptr(), down.data_ptr(), up.shape[1]] for up, down, _ in its]
            rows, columns = target.shape[:2]
            weights.append([target.data_ptr(), loaded.data_ptr(), rows, columns, first, len(changes)])
        return weights, changes, [factor for its in self.changes for *_, factor in its]


merge_lora = Operation("merge_lora", MergeLoRACall)


def _described(tensor: Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}{contiguous}"
