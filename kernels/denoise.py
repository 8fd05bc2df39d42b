"""Denoise step: guidance, x0, clipping, x_{t-1} and noise in one launch, driven by one row of coefficients.

All samplers share this arithmetic and differ only in the coefficients, which `COLUMNS` names. The noise
is counter-based (`host.philox`): it depends only on a picture's seed, the step and the element, not on the batch or the
device.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial

import torch
from torch import Tensor

from fastdiff.kernels.device.denoise_columns import COLUMNS, EARLIER
from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.launching import launch
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.host.philox import philox_normal
from fastdiff.kernels.plans.dispatch import Operation

VARIANCES = ("fixed", "learned", "learned_range")
BLOCK = 512  # elements per program; chosen, not measured


@dataclass(frozen=True)
class StepOptions:
    """The options shared by all steps of a run."""

    threshold_ratio: float | None = None  # x0 is scaled by this quantile of |x0| over the picture instead of clamped
    threshold_max: float = 1.0  # upper bound of that quantile
    variance: str = "fixed"  # one of VARIANCES; the second half of the model output's channels holds a learned one

    def __post_init__(self) -> None:
        if self.variance not in VARIANCES:
            raise ValueError(f"variance is {self.variance!r}; use one of {', '.join(VARIANCES)}")


@dataclass(frozen=True, eq=False)
class DenoiseStepCall(Call[tuple[Tensor, ...]]):
    """One sampler step with the coefficients of `row`.

    The sampler is, for example, DDPM (Ho et al. 2020, eq. 7) or DDIM (Song et al. 2021, eq. 12).

    Args:
        model_output: (N, ..., C) of any float dtype, or (N, ..., 2C) if `options` has a learned variance.
        x_t: (N, ..., C) float32; with float64 all arithmetic is float64.
        row: (len(COLUMNS),) float32 on the same device; with `step`, the table of all rows, (rows, len(COLUMNS)), or a
            table for each picture, (N, rows, len(COLUMNS)).
        options: the `StepOptions` of the run.
        noise: (N, ..., C) of any float dtype, unit normal; or, with `step`, the pictures' seeds, (N,) int64, for the
            noise of `philox_normal`. None adds no noise, as in the last step of a chain.
        unguided: the unconditional prediction, like model_output (Ho & Salimans 2022, eq. 6).
        guidance_scale: 1 leaves the conditional prediction unchanged. A number, or (N,) float32 on the same device,
            read when the step runs.
        step: (N,) int32 on the same device: the row of each picture, read when the step runs.
        earlier: (N, EARLIER, ..., C), the dtype of x_t: s, h1, h2 and h3 of each picture, zero if not kept yet. Only
            rows whose `reads_earlier` is 1 read it.

    Returns:
        x_{t-1} and x0, both (N, ..., C) in the dtype of x_t; with `earlier`, also the next call's `earlier`, whose
        values are undefined for rows that do not read it.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    model_output: Tensor
    x_t: Tensor
    row: Tensor
    options: StepOptions
    _: KW_ONLY
    noise: Tensor | None = None
    unguided: Tensor | None = None
    guidance_scale: float | Tensor = 1.0
    step: Tensor | None = None
    earlier: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.x_t.device

    @property
    def seeded(self) -> bool:
        """Whether `noise` holds the pictures' seeds."""
        return self.step is not None and self.noise is not None and self.noise.dtype == torch.int64

    def check(self) -> None:
        x_t, row, variance = self.x_t, self.row, self.options.variance
        if x_t.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"x_t is {x_t.dtype}; it must be float32 (or float64)")
        if x_t.ndim < 1:
            raise ValueError("x_t is a scalar; its shape must be (N, ..., C)")
        shape, width = tuple(x_t.shape), len(COLUMNS)
        output_shape = (*shape[:-1], (1 if variance == "fixed" else 2) * shape[-1])
        check = partial(_check_tensor, x_t, f"with x_t {shape} and {variance} variance")
        check("model_output", self.model_output, [output_shape])
        check("unguided", self.unguided, [output_shape])
        check("row", row, [(width,)] if self.step is None else table_shapes(row, shape[0]), torch.float32)
        check("step", self.step, [shape[:1]], torch.int32)
        check("earlier", self.earlier, [(*shape[:1], EARLIER, *shape[1:])], x_t.dtype)
        if isinstance(self.guidance_scale, Tensor):
            check("guidance_scale", self.guidance_scale, [shape[:1]], torch.float32)
        if self.seeded:
            check("noise", self.noise, [shape[:1]], torch.int64)
        else:
            check("noise", self.noise, [shape])

    def reference(self) -> tuple[Tensor, ...]:
        if self.step is None:
            return self._by_row(self.row, self.noise)
        noise = self.noise
        if noise is not None and self.seeded:
            noise = philox_normal(noise, self.step.long(), self.x_t.shape[1:])
        # the columns of each picture: (N, 1, ..., 1, len(COLUMNS))
        rows = rows_at(self.row, self.step).view(-1, *[1] * (self.x_t.ndim - 1), len(COLUMNS))
        return self._by_row(rows, noise)

    def _by_row(self, row: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the step from a row (..., len(COLUMNS)) for all pictures or for each, and noise (N, ..., C)."""
        c = dict(zip(COLUMNS, row.unbind(-1), strict=True))
        x_t, options, channels = self.x_t, self.options, self.x_t.shape[-1]
        eps = self.model_output[..., :channels].to(x_t.dtype)
        if self.unguided is not None:
            null, scale = self.unguided[..., :channels].to(x_t.dtype), self.guidance_scale
            if isinstance(scale, Tensor):
                scale = scale.view(-1, *[1] * (x_t.ndim - 1))
            eps = null + scale * (eps - null)

        # in place: on the CPU a fresh large tensor costs more than the arithmetic on it
        x0 = (c["x0_x"] * x_t).add_(c["x0_m"] * eps).div_(c["x0_div"])
        if options.threshold_ratio is not None:
            x0 = dynamic_threshold(x0, options.threshold_ratio, options.threshold_max)
        else:
            limit = torch.where(c["clip_range"] > 0, c["clip_range"], math.inf)
            x0 = x0.clamp_(-limit, limit)

        x_prev = (c["prev_x0"] * x0).add_(c["prev_x"] * x_t).add_(c["prev_m"] * eps)
        kept = () if self.earlier is None else (self._keep(c, x0, eps, x_prev),)
        if noise is not None:
            self._add_noise(c, noise.to(x_t.dtype), x_prev)
        return x_prev, x0, *kept

    def _keep(self, c: Mapping[str, Tensor], x0: Tensor, eps: Tensor, x_prev: Tensor) -> Tensor:
        """Add the terms of earlier calls to `x_prev`, and return the next call's `earlier`."""
        s, h1, h2, h3 = self.earlier.unbind(1)  # type: ignore[union-attr]  # only called if there is one
        y = (c["y_x"] * self.x_t).add_(c["y_x0"] * x0).add_(c["y_s"] * s)
        y.add_(c["y_h1"] * h1).add_(c["y_h2"] * h2).add_(c["y_h3"] * h3)
        x_prev.add_(c["prev_y"] * y).add_(c["prev_h1"] * h1).add_(c["prev_h2"] * h2).add_(c["prev_h3"] * h3)
        output = (c["keep_x"] * self.x_t).add_(c["keep_x0"] * x0).add_(c["keep_m"] * eps)
        keeps = c["keeps_output"] > 0
        outputs = (torch.where(keeps, new, old) for new, old in ((output, h1), (h1, h2), (h2, h3)))
        return torch.stack([y, *outputs], dim=1)

    def _add_noise(self, c: Mapping[str, Tensor], noise: Tensor, x_prev: Tensor) -> None:
        x_t, sigma, options = self.x_t, c["sigma"], self.options
        if options.variance == "fixed":
            x_prev.add_(sigma * noise)
            return
        channels = x_t.shape[-1]
        learned = self.model_output[..., channels:].to(x_t.dtype)
        if options.variance == "learned":
            std = sigma * learned.sqrt()
        else:
            # Nichol & Dhariwal 2021, eq. 15: the model's output in [-1, 1] interpolates between the two log variances
            low, high = c["log_variance_min"], c["log_variance_max"]
            log_variance = low + (learned + 1) / 2 * (high - low)
            std = sigma * (log_variance / 2).exp()
        x_prev.add_(torch.where(sigma > 0, std * noise, 0))  # at sigma 0 the learned variance may be anything

    def obstacle(self) -> str | None:
        if self.options.threshold_ratio is not None:
            return "dynamic thresholding needs a sort"
        tensors = (self.model_output, self.unguided, self.x_t, self.noise)  # `earlier` has the dtype of x_t
        if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
            return "no kernel for torch.float64"
        return None

    def kernel(self) -> tuple[Tensor, ...]:
        from fastdiff.kernels.device.denoise import denoise_kernel  # imports Triton

        scale = self.guidance_scale
        scales, scale = (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)
        given = (self.model_output, self.unguided, self.x_t, self.row, self.step, self.noise, self.earlier, scales)
        inputs = [None if tensor is None else tensor.contiguous() for tensor in given]
        outputs = [torch.empty(self.x_t.shape, dtype=torch.float32, device=self.device) for _ in range(2)]
        kept = None if self.earlier is None else torch.empty_like(self.earlier, memory_format=torch.contiguous_format)
        pictures, channels = self.x_t.shape[0], self.x_t.shape[-1]
        elements = self.x_t.numel() // pictures
        launch(
            denoise_kernel, (pictures * triton.cdiv(elements, BLOCK),),
            *outputs, kept, *inputs, elements, channels, table_stride(self.row), scale,
            WIDTH=len(COLUMNS), VARIANCE=self.options.variance, BLOCK=BLOCK, num_warps=4, fp_fusion=False,
        )  # fmt: skip
        return tuple(outputs) if kept is None else (*outputs, kept)


denoise_step = Operation("denoise_step", DenoiseStepCall)


def table_shapes(table: Tensor, pictures: int) -> list[tuple[int, ...]]:
    """Return the shapes that a table of rows may have: one table for all pictures, or one for each."""
    width = len(COLUMNS)
    return [(pictures, *table.shape[1:2], width)] if table.ndim == 3 else [(*table.shape[:1], width)]


def table_stride(table: Tensor) -> int:
    """Return the elements from a picture's table to the next picture's; 0 if all pictures have the same."""
    return table.shape[1] * table.shape[2] if table.ndim == 3 else 0


def rows_at(table: Tensor, step: Tensor) -> Tensor:
    """Return the row of each picture, (N, len(COLUMNS)). `step` is (N,) int32."""
    if table.ndim == 3:
        return table[torch.arange(len(step), device=step.device), step.long()]
    return table.index_select(0, step)


def dynamic_threshold(x0: Tensor, ratio: float, maximum: float) -> Tensor:
    """Apply Imagen's dynamic thresholding (Saharia et al. 2022, section 2.3) to x0 (N, ...), picture by picture.

    s is the quantile `ratio` of `|x0|`, clamped to [1, maximum]; x0 is clamped to [-s, s] and divided by s.
    """
    # torch.quantile refuses pictures of more than 2^24 elements, and kthvalue fails in torch's deterministic mode
    magnitude = x0.abs().flatten(1).sort(dim=1).values
    rank = ratio * (magnitude.shape[1] - 1)
    low, high = magnitude[:, math.floor(rank)], magnitude[:, math.ceil(rank)]
    s = torch.lerp(low, high, rank - math.floor(rank)).clamp(1, maximum)
    s = s.view(-1, *[1] * (x0.ndim - 1))
    return x0.clamp(-s, s) / s


def _check_tensor(
    x_t: Tensor,
    setting: str,
    name: str,
    tensor: Tensor | None,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype | None = None,
) -> None:
    """Raise ValueError unless `tensor` is None or has one of `shapes`, `dtype` (None: any float) and x_t's device."""
    if tensor is None:
        return
    if tensor.dtype != dtype if dtype is not None else not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}; it must be {dtype or 'a float dtype'}")
    if tuple(tensor.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {' or '.join(map(str, shapes))} {setting}")
    if tensor.device != x_t.device:
        raise ValueError(f"{name} is on {tensor.device}, but x_t is on {x_t.device}")
