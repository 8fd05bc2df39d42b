"""Activations in 8 bits: e4m3, and a factor for each token or picture, by its largest magnitude.

The factor is of a token or a picture alone, so that neither depends on what else is in the batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.kernels.device.language import triton
from fastdiff.kernels.device.to_fp8 import largest_kernel, row_kernel, scale_kernel
from fastdiff.kernels.from_int8 import as_loaded
from fastdiff.kernels.host.calls import PartsCall, check_pictures, parts_of
from fastdiff.kernels.host.launching import DTYPES, fp8_obstacle, launch, side_by_side
from fastdiff.kernels.host.weights import FP8, MOST, Factors, Quantised, Scaled, Weight
from fastdiff.kernels.plans.dispatch import Operation

# Of the largest magnitude of a row, what is 1 in e4m3, and the least that it is taken for, so that zeros have a factor.
FORMAT: dict[str, Any] = {"STEP": 1 / MOST[FP8], "LEAST": 1e-30}
# Chosen, not measured.
LONGEST = 8192  # elements of a row that a program holds
BLOCK = 4096  # elements of a longer one that a program takes at a time
SHARES = 256  # of a longer row, at most, whose largest are found side by side


@dataclass(frozen=True, eq=False)
class ToFp8Call(PartsCall[tuple[Scaled, ...]]):
    """x / scale in e4m3 (Micikevicius et al. 2022, arXiv 2209.05433), where scale makes the largest magnitude 448.

    NaN stays where it is; of an infinity the whole token or picture is NaN, as its products would be.

    Args:
        x: tokens (N, L, C), or pictures (N, H, W, C), float32, float16 or bfloat16; or a pair of pictures, which are
            read as their concatenation over C and have one factor.

    Returns: a `Scaled` for each part of x. Raises ValueError for an x of another shape.
    """

    x: Tensor | tuple[Tensor, ...]

    def check(self) -> None:
        if isinstance(self.x, tuple) or self.x.ndim != 3:
            check_pictures(self.parts)

    @property
    def rows(self) -> list[Tensor]:
        """Views, or copies, (rows, elements), of a factor each."""
        return [side_by_side(part.flatten(0, -2) if part.ndim == 3 else part.flatten(1)) for part in self.parts]

    def reference(self) -> tuple[Scaled, ...]:
        rows = [part.float() for part in self.rows]
        largest = [torch.where(part.isnan(), 0, part).abs().amax(1) for part in rows]
        scale = torch.stack(largest).amax(0).clamp(min=FORMAT["LEAST"]) * FORMAT["STEP"]
        factor = (1 / scale)[:, None]
        return self._shaped([(part * factor).to(FP8) for part in rows], scale)

    def _shaped(self, values: list[Tensor], scale: Tensor) -> tuple[Scaled, ...]:
        """The values of rows in the shapes of x."""
        shape = self.parts[0].shape
        scale = scale.view(shape[:2] if len(shape) == 3 else shape[:1])
        made = zip(values, self.parts, strict=True)
        return tuple(Scaled(each.view(part.shape), scale, part.dtype) for each, part in made)

    def obstacle(self) -> str | None:
        if any(part.dtype not in DTYPES or part.numel() == 0 for part in self.parts):
            return f"{[tuple(part.shape) for part in self.parts]} of {self.parts[0].dtype} has no kernel"
        return fp8_obstacle(self.device)

    def kernel(self) -> tuple[Scaled, ...]:
        rows = self.rows
        scale = rows[0].new_empty(len(rows[0]), dtype=torch.float32)
        values = [torch.empty(part.shape, dtype=FP8, device=part.device) for part in rows]
        if len(rows) == 1 and rows[0].shape[1] <= LONGEST:
            _scale_short(values[0], scale, rows[0])
        else:
            _scale_long(values, scale, rows)
        return self._shaped(values, scale)


to_fp8 = Operation("to_fp8", ToFp8Call)


def _scale_short(values: Tensor, scale: Tensor, x: Tensor) -> None:
    count, elements = x.shape
    block = max(16, triton.next_power_of_2(elements))
    launch(
        row_kernel, (count,), values, scale, x, elements, x.stride(0), B=block,
        **FORMAT, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip


def _scale_long(values: list[Tensor], scale: Tensor, rows: list[Tensor]) -> None:
    """Each row by several programs: their largest first."""
    blocks = [triton.cdiv(part.shape[1], BLOCK) for part in rows]
    shares = [min(count, SHARES) for count in blocks]
    largest = scale.new_empty(len(scale), sum(shares))
    for i, part in enumerate(rows):
        launch(
            largest_kernel, (len(part) * shares[i],),
            largest, part, part.shape[1], part.stride(0), shares[i], sum(shares[:i]), sum(shares), B=BLOCK, num_warps=8,
        )  # fmt: skip
    for part, out, count in zip(rows, values, blocks, strict=True):
        launch(
            scale_kernel, (len(part) * count,),
            out, scale, part, largest, part.shape[1], part.stride(0), count, sum(shares),
            B=BLOCK, BS=max(16, triton.next_power_of_2(sum(shares))), **FORMAT, num_warps=8,
        )  # fmt: skip


def factors(x: Tensor | Scaled, weight: Weight) -> Factors:
    """Return tokens and a weight as kernels load them: beside a weight in fp8 the tokens are made so."""
    scaled = to_fp8(x)[0] if isinstance(x, Tensor) and weight.dtype == FP8 else x
    values, x_scale = (scaled.values, scaled.scale) if isinstance(scaled, Scaled) else (scaled, None)
    columns, scale = (weight.values, weight.scale) if isinstance(weight, Quantised) else (weight, None)
    return Factors(values, as_loaded(columns.contiguous(), values.dtype), x_scale, scale)


def as_multiplied(x: Tensor | Scaled | tuple[Tensor, ...], weight: Weight) -> tuple[Tensor, ...]:
    """Return the parts of x as they are multiplied by a weight, for references: what 8 bits leave of them, or all."""
    if isinstance(x, Scaled):
        return (x.dequantised(x.dtype),)
    parts = parts_of(x)
    return tuple(part.dequantised(part.dtype) for part in to_fp8.reference(x)) if weight.dtype == FP8 else parts
