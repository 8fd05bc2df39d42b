"""The model's input for a step: x_t divided by `input_div` of its row, in the model's dtype, once for each half.

All samplers share it. `input_div` is 1 for a sampler whose model sees x_t itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.kernels.denoise import rows_at, table_shapes, table_stride
from fastdiff.kernels.device.denoise_columns import COLUMNS
from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.launching import DTYPES, launch
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.plans.dispatch import Operation

BLOCK = 1024  # elements per program; chosen, not measured
INPUT_DIV = COLUMNS.index("input_div")


@dataclass(frozen=True, eq=False)
class ScaleInputCall(Call[Tensor]):
    """Diffusers' `scale_model_input`, a cast, and `torch.cat([x] * copies)`, in one pass.

    Args:
        x_t: (N, ..., C) float32.
        rows: (rows, len(COLUMNS)) float32 on the same device, the table of `denoise_step`, or (N, rows, len(COLUMNS)).
        step: (N,) int32 on the same device: the row of each picture, read when the step runs.
        dtype: of the result: float32, float16 or bfloat16.
        copies: 2 for a guided batch, whose model call computes both halves; else 1.

    Returns:
        (copies * N, ..., C), contiguous, in `dtype`.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    x_t: Tensor
    rows: Tensor
    step: Tensor
    dtype: torch.dtype
    copies: int = 1

    @property
    def device(self) -> torch.device:
        return self.x_t.device

    def check(self) -> None:
        x_t, rows, step = self.x_t, self.rows, self.step
        if x_t.dtype != torch.float32 or x_t.ndim < 1:
            raise ValueError(f"x_t: expected float32 (N, ..., C), got {x_t.dtype} {tuple(x_t.shape)}")
        if rows.dtype != torch.float32 or tuple(rows.shape) not in table_shapes(rows, len(x_t)):
            expected = f"float32 (rows, {len(COLUMNS)}) or ({len(x_t)}, rows, {len(COLUMNS)})"
            raise ValueError(f"rows: expected {expected}, got {rows.dtype} {tuple(rows.shape)}")
        if step.dtype != torch.int32 or step.shape != x_t.shape[:1]:
            raise ValueError(f"step: expected int32 ({len(x_t)},), got {step.dtype} {tuple(step.shape)}")
        for name, tensor in (("rows", rows), ("step", step)):
            if tensor.device != x_t.device:
                raise ValueError(f"{name} is on {tensor.device}, but x_t is on {x_t.device}")
        if not self.dtype.is_floating_point or self.copies < 1:
            raise ValueError(f"dtype is {self.dtype} and copies is {self.copies}; give a float dtype and at least 1")

    def reference(self) -> Tensor:
        divisors = rows_at(self.rows, self.step)[:, INPUT_DIV]
        x = (self.x_t / divisors.view(-1, *[1] * (self.x_t.ndim - 1))).to(self.dtype)
        return torch.cat([x] * self.copies) if self.copies > 1 else x.contiguous()

    def obstacle(self) -> str | None:
        known = self.dtype in DTYPES and self.x_t.numel() > 0
        return None if known else f"no kernel for {self.dtype} of {tuple(self.x_t.shape)}"

    def kernel(self) -> Tensor:
        from fastdiff.kernels.device.scale_input import scale_input_kernel  # imports Triton

        x_t, (pictures, *shape) = self.x_t.contiguous(), self.x_t.shape
        elements = x_t.numel() // pictures
        out = torch.empty(self.copies * pictures, *shape, dtype=self.dtype, device=self.device)
        launch(
            scale_input_kernel, (pictures * triton.cdiv(elements, BLOCK),),
            out, x_t, self.rows.contiguous(), self.step, elements, x_t.numel(), table_stride(self.rows),
            WIDTH=len(COLUMNS), COPIES=self.copies, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return out


scale_input = Operation("scale_input", ScaleInputCall)
