"""LayerNorm and RMSNorm over tokens in one pass, with gate and residual before and the adaLN scale and shift after.

Where a branch ends in an RMSNorm of its own, as in Z-Image, the same pass computes that first.

A program reads a token once and holds it in registers. It computes the mean, then the squared distances from it, both
in float32, because plain sums of squares would cancel on a large mean.
"""

from dataclasses import KW_ONLY, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.launching import DTYPES, fp8_obstacle, launch, side_by_side
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.host.weights import FP8, Scaled
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.kernels.to_fp8 import FORMAT, to_fp8

Normed = Tensor | Scaled | tuple[Tensor | Scaled, Tensor]
MAX_WIDTH = 16384  # most channels that a program holds; chosen, not measured
NARROW = 512  # channels up to which a program loops over tokens: starting a program costs more than such a token
PROGRAMS = 4224  # most programs for narrow tokens: as many as an H200 runs at once


@dataclass(frozen=True, eq=False)
class LayerNormCall(Call[Normed]):
    """norm(x * gate + residual) * (1 + scale) + shift: the norms of transformers, as in diffusers' AdaLayerNormZero.

    LayerNorm is from Ba et al. 2016 (arXiv 1607.06450), RMSNorm from Zhang and Sennrich 2019 (arXiv 1910.07467), and
    the gate on a residual branch from Peebles and Xie 2022 (arXiv 2212.09748).

    Args:
        x: (N, L, C), float32, float16 or bfloat16; tokens may be strided.
        weight, bias: (C,) of any float dtype; None for 1 and 0. RMSNorm has no bias.
        eps: added to the variance, or to the mean square.
        rms: use RMSNorm, which does not subtract the mean.
        residual: (N, L, C), the dtype of x. The sum is rounded to that dtype, then normalised.
        branch_norm: weight (C,) of any float dtype, and eps, of an RMSNorm of x before gate and residual, only with
            `residual`.
        gate: (N, C) of any float dtype, only with `residual`; rows may be strided.
        scale, shift: (N, C) of any float dtype; rows may be strided (columns of a wider table). shift needs scale.
        in_fp8: return y as `Scaled`, for fp8 products: the result of `to_fp8`, without a separate pass.

    Returns:
        y (N, L, C), contiguous, the dtype of x; with `residual`, (y, the sum).

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    _: KW_ONLY
    eps: float
    rms: bool = False
    residual: Tensor | None = None
    branch_norm: tuple[Tensor, float] | None = None
    gate: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    in_fp8: bool = False

    @property
    def device(self) -> torch.device:
        return self.x.device

    def check(self) -> None:
        x = self.x
        if x.ndim != 3 or not x.is_floating_point() or x.shape[-1] < 1:
            raise ValueError(f"x: expected floats (N, L, C), got {x.dtype} {tuple(x.shape)}")
        if self.rms and self.bias is not None:
            raise ValueError("bias: RMSNorm has none; leave it out")
        if self.shift is not None and self.scale is None:
            raise ValueError("shift: give scale too; zeros change nothing")
        if self.gate is not None and self.residual is None:
            raise ValueError("gate: give residual too; the gate scales x before x is added to it")
        if self.branch_norm is not None and self.residual is None:
            raise ValueError("branch_norm: give residual too; this norm is of x before x is added to it")
        row, table = (x.shape[2],), (x.shape[0], x.shape[2])
        given = {
            "weight": (self.weight, row),
            "bias": (self.bias, row),
            "residual": (self.residual, tuple(x.shape)),
            "branch_norm": (None if self.branch_norm is None else self.branch_norm[0], row),
            "gate": (self.gate, table),
            "scale": (self.scale, table),
            "shift": (self.shift, table),
        }
        for name, (tensor, shape) in given.items():
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: expected {shape}, got {tuple(tensor.shape)}")
            if tensor.device != x.device or not tensor.is_floating_point():
                raise ValueError(f"{name}: {tensor.dtype} on {tensor.device}, but x is {x.dtype} on {x.device}")
        if self.residual is not None and self.residual.dtype != x.dtype:
            raise ValueError(f"residual: {self.residual.dtype}, but x is {x.dtype}")

    def reference(self) -> Normed:
        x = self.x
        if self.branch_norm is not None:
            branch_weight, branch_eps = self.branch_norm
            x = F.rms_norm(x.float(), x.shape[-1:], branch_weight.float(), branch_eps).to(x.dtype)
        x = x if self.gate is None else x * self.gate[:, None].to(x.dtype)
        total = x if self.residual is None else x + self.residual
        rows = total.float()
        weight, bias = (None if tensor is None else tensor.float() for tensor in (self.weight, self.bias))
        if self.rms:
            y = F.rms_norm(rows, rows.shape[-1:], weight, self.eps)
        else:
            y = F.layer_norm(rows, rows.shape[-1:], weight, bias, self.eps)
        if self.scale is not None:
            factor = 1 + self.scale.float()[:, None]
            y = y * factor if self.shift is None else torch.addcmul(self.shift.float()[:, None], y, factor)
        made = to_fp8.reference(y.to(x.dtype))[0] if self.in_fp8 else y.to(x.dtype)
        return made if self.residual is None else (made, total)

    def obstacle(self) -> str | None:
        if self.x.dtype not in DTYPES or self.x.numel() == 0 or self.x.shape[2] > MAX_WIDTH:
            return f"no kernel for {self.x.dtype} of {tuple(self.x.shape)}"
        return fp8_obstacle(self.device) if self.in_fp8 else None

    def kernel(self) -> Normed:
        from fastdiff.kernels.device.layer_norm import layer_norm_kernel  # imports Triton

        n, tokens, channels = self.x.shape
        x = side_by_side(self.x)
        residual, weight, bias = map(side_by_side, (self.residual, self.weight, self.bias))
        gate, scale, shift = map(side_by_side, (self.gate, self.scale, self.shift))
        branch_weight, branch_eps = self.branch_norm or (None, None)
        y = torch.empty(n, tokens, channels, dtype=FP8 if self.in_fp8 else x.dtype, device=x.device)
        y_scale = torch.empty(n, tokens, dtype=torch.float32, device=x.device) if self.in_fp8 else None
        total = None if residual is None else x.new_empty(n, tokens, channels)
        warps = 1 if channels <= 2048 else 8  # from the width alone: the number of lanes sets the bits of a sum
        first = max(1, triton.next_power_of_2(channels) // 2)
        rest = max(1, triton.next_power_of_2(channels - first))
        loop = channels <= NARROW
        launch(
            layer_norm_kernel, (min(n * tokens, PROGRAMS) if loop else n * tokens,),
            y, y_scale, total, x, residual, gate, weight, bias, scale, shift, side_by_side(branch_weight), n, tokens,
            *x.stride()[:2],
            *((0, 0) if residual is None else residual.stride()[:2]),
            *(0 if table is None else table.stride(0) for table in (gate, scale, shift)), self.eps, branch_eps,
            LOOP=loop, RMS=self.rms, C=channels, B1=first, B2=rest, **FORMAT, num_warps=warps,
        )  # fmt: skip
        made = y if y_scale is None else Scaled(y, y_scale, x.dtype)
        return made if total is None else (made, total)


layer_norm = Operation("layer_norm", LayerNormCall)
