"""Quantise activations to fp8 (e4m3), with one scale per token or picture taken from its largest magnitude.

Scales are per token or per picture, so a picture's bits do not depend on its batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.kernels.from_int8 import as_loaded
from fastdiff.kernels.host.calls import PartsCall, check_pictures, parts_of
from fastdiff.kernels.host.launching import DTYPES, fp8_obstacle, launch, side_by_side
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.host.weights import FP8, MOST, Factors, Quantised, Scaled, Weight
from fastdiff.kernels.plans.dispatch import Operation

# STEP: the scale for a largest magnitude of 1. LEAST: a lower bound on that magnitude, so a row of zeros has a scale.
FORMAT: dict[str, Any] = {"STEP": 1 / MOST[FP8], "LEAST": 1e-30}
# Chosen, not measured.
LONGEST = 8192  # elements of the longest row that one program holds
BLOCK = 4096  # elements of a longer row that a program handles at a time
SHARES = 256  # programs, at most, that reduce a longer row in parallel


@dataclass(frozen=True, eq=False)
class ToFp8Call(PartsCall[tuple[Scaled, ...]]):
    """x / scale in e4m3 (Micikevicius et al. 2022, arXiv 2209.05433), where scale makes the largest magnitude 448.

    NaN stays where it is. An infinity makes its whole token or picture NaN, as it would make the products.

    Args:
        x: tokens (N, L, C) or pictures (N, H, W, C), float32, float16 or bfloat16; or a pair of picture tensors, read
            as their concatenation over C with one scale per picture.

    Returns:
        A `Scaled` for each part of x.

    Raises:
        ValueError: x has another shape.
    """

    x: Tensor | tuple[Tensor, ...]

    def check(self) -> None:
        if isinstance(self.x, tuple) or self.x.ndim != 3:
            check_pictures(self.parts)

    @property
    def rows(self) -> list[Tensor]:
        """The parts as (rows, elements) with one scale per row; views if possible, else copies."""
        return [side_by_side(part.flatten(0, -2) if part.ndim == 3 else part.flatten(1)) for part in self.parts]

    def reference(self) -> tuple[Scaled, ...]:
        rows = [part.float() for part in self.rows]
        largest = [torch.where(part.isnan(), 0, part).abs().amax(1) for part in rows]
        scale = torch.stack(largest).amax(0).clamp(min=FORMAT["LEAST"]) * FORMAT["STEP"]
        factor = (1 / scale)[:, None]
        return self._shaped([(part * factor).to(FP8) for part in rows], scale)

    def _shaped(self, values: list[Tensor], scale: Tensor) -> tuple[Scaled, ...]:
        """Reshape the rows' values and scales to the shapes of x."""
        shape = self.parts[0].shape
        scale = scale.view(shape[:2] if len(shape) == 3 else shape[:1])
        made = zip(values, self.parts, strict=True)
        return tuple(Scaled(each.view(part.shape), scale, part.dtype) for each, part in made)

    def obstacle(self) -> str | None:
        if any(part.dtype not in DTYPES or part.numel() == 0 for part in self.parts):
            return f"no kernel for {self.parts[0].dtype} of {[tuple(part.shape) for part in self.parts]}"
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
    from fastdiff.kernels.device.to_fp8 import row_kernel  # imports Triton

    count, elements = x.shape
    block = max(16, triton.next_power_of_2(elements))
    launch(
        row_kernel, (count,), values, scale, x, elements, x.stride(0), B=block,
        **FORMAT, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip


def _scale_long(values: list[Tensor], scale: Tensor, rows: list[Tensor]) -> None:
    """Quantise long rows, with several programs per row: first find the largest magnitudes, then write the values."""
    from fastdiff.kernels.device.to_fp8 import largest_kernel, scale_kernel  # imports Triton

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
    """Return tokens and a weight as kernels load them. An fp8 weight needs fp8 tokens, which are made here."""
    scaled = to_fp8(x)[0] if isinstance(x, Tensor) and weight.dtype == FP8 else x
    values, x_scale = (scaled.values, scaled.scale) if isinstance(scaled, Scaled) else (scaled, None)
    columns, scale = (weight.values, weight.scale) if isinstance(weight, Quantised) else (weight, None)
    return Factors(values, as_loaded(columns.contiguous(), values.dtype), x_scale, scale)


def as_multiplied(x: Tensor | Scaled | tuple[Tensor, ...], weight: Weight) -> tuple[Tensor, ...]:
    """Return the parts of x for a reference product with `weight`: rounded through fp8 if the weight is fp8."""
    if isinstance(x, Scaled):
        return (x.dequantised(x.dtype),)
    parts = parts_of(x)
    return tuple(part.dequantised(part.dtype) for part in to_fp8.reference(x)) if weight.dtype == FP8 else parts
