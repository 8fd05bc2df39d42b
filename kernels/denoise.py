"""Denoise step: guidance, x0, clipping and x_{t-1} in one go, driven by one row of coefficients, and its noise.

DDPM and DDIM are the same arithmetic with other numbers in the row. The noise is counter-based (Philox), so a picture's
noise depends on its seed, the step and the element alone: not on the batch, not on the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff.kernels.device.denoise import denoise_kernel
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.dispatch import Declined, Operation
from fastdiff.kernels.host.launching import launch

# One row of the table, for a model output m, the current picture x_t and unit noise z:
#   x0      = clip((x0_x * x_t + x0_m * m) / x0_div)
#   x_{t-1} = prev_x0 * x0 + prev_x * x_t + prev_m * m + std * z
# std is sigma, or with a learned variance sigma times what the model says, between the two log variances.
COLUMNS = ("x0_x", "x0_m", "x0_div", "prev_x0", "prev_x", "prev_m", "sigma", "log_variance_min", "log_variance_max")

VARIANCES = ("fixed", "learned", "learned_range")

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class StepOptions:
    """What is the same in every step of a run."""

    clip_range: float | None = None  # x0 is clamped to [-clip_range, clip_range]
    threshold_ratio: float | None = None  # x0 is scaled by this quantile of |x0| over the picture, instead of clamped
    threshold_max: float = 1.0  # upper bound of that quantile
    variance: str = "fixed"  # of VARIANCES; a learned one is the second half of the model output's channels

    def __post_init__(self):
        if self.variance not in VARIANCES:
            raise ValueError(f"variance is {self.variance!r}; it is one of {', '.join(VARIANCES)}")
        if self.clip_range is not None and self.threshold_ratio is not None:
            raise ValueError("clip_range and threshold_ratio exclude each other; leave one of them None")


class StepBuffers(NamedTuple):
    """Where a step writes, so that a CUDA graph can replay it. All contiguous; x_prev may be x_t itself."""

    x_prev: Tensor  # (N, ..., C), the dtype of x_t
    x0: Tensor | None = None  # the same
    model_input: Tensor | None = None  # (N, ..., C) of any float dtype, or (2N, ..., C): x_{t-1} twice


@Operation
def denoise_step(
    model_output: Tensor,
    x_t: Tensor,
    row: Tensor,
    options: StepOptions = StepOptions(),
    *,
    noise: Tensor | None = None,
    unguided: Tensor | None = None,
    guidance_scale: float = 1.0,
    step: Tensor | None = None,
    out: StepBuffers | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One step of DDPM (Ho et al. 2020, eq. 7) or DDIM (Song et al. 2021, eq. 12), as `row` says.

    model_output    (N, ..., C) of any float dtype, or (N, ..., 2C) where `options` says the variance is learned
    x_t             (N, ..., C) float32 (or float64, then all arithmetic is)
    row             (len(COLUMNS),) float32 on the same device; with `step` the table of all rows, (steps, len(COLUMNS))
    noise           (N, ..., C) of any float dtype, unit normal; or with `step` (N,) int64, the pictures' seeds, for the
                    noise of `philox_normal`. None adds none, which is the last step of a chain
    unguided        like model_output: what the model says of the null label (Ho & Salimans 2022, eq. 6)
    guidance_scale  1 is the guided output as it is
    step            (1,) int32 on the same device: which step this is, read when the step runs
    out             buffers to write instead of new tensors

    Returns x_{t-1} and x0, both (N, ..., C) in x_t's dtype (x0 None where `out` has none). Raises ValueError naming the
    argument that does not fit.
    """
    _check_arguments(model_output, x_t, row, options, noise, unguided, step, out)
    if step is not None:
        row = row.index_select(0, step)[0]
        if noise is not None and noise.dtype == torch.int64:
            noise = philox_normal(noise, step.long(), x_t.shape[1:])
    x_prev, x0 = _step(model_output, x_t, row, options, noise, unguided, guidance_scale)
    if out is None:
        return x_prev, x0
    out.x_prev.copy_(x_prev)
    if out.x0 is not None:
        out.x0.copy_(x0)
    if out.model_input is not None:
        out.model_input.unflatten(0, (-1, len(x_t))).copy_(x_prev)
    return out.x_prev, out.x0


def _step(
    model_output: Tensor,
    x_t: Tensor,
    row: Tensor,
    options: StepOptions,
    noise: Tensor | None,
    unguided: Tensor | None,
    guidance_scale: float,
) -> tuple[Tensor, Tensor]:
    x0_x, x0_m, x0_div, prev_x0, prev_x, prev_m, sigma, log_variance_min, log_variance_max = row.unbind()
    channels = x_t.shape[-1]
    eps = model_output[..., :channels].to(x_t.dtype)
    if unguided is not None:
        null = unguided[..., :channels].to(x_t.dtype)
        eps = null + guidance_scale * (eps - null)

    # in place: on the CPU a fresh large tensor costs more than the arithmetic on it
    x0 = (x0_x * x_t).add_(x0_m * eps).div_(x0_div)
    if options.clip_range is not None:
        x0 = x0.clamp_(-options.clip_range, options.clip_range)
    elif options.threshold_ratio is not None:
        x0 = dynamic_threshold(x0, options.threshold_ratio, options.threshold_max)

    x_prev = (prev_x0 * x0).add_(prev_x * x_t).add_(prev_m * eps)
    if noise is None:
        return x_prev, x0
    noise = noise.to(x_t.dtype)
    if options.variance == "fixed":
        return x_prev.add_(sigma * noise), x0
    learned = model_output[..., channels:].to(x_t.dtype)
    if options.variance == "learned":
        std = sigma * learned.sqrt()
    else:
        # Nichol & Dhariwal 2021, eq. 15: the model's output in [-1, 1] interpolates between the two log variances
        log_variance = log_variance_min + (learned + 1) / 2 * (log_variance_max - log_variance_min)
        std = sigma * (log_variance / 2).exp()
    return x_prev.add_(torch.where(sigma > 0, std * noise, 0)), x0  # at sigma 0 the model may say anything


def dynamic_threshold(x0: Tensor, ratio: float, maximum: float) -> Tensor:
    """Imagen's dynamic thresholding (Saharia et al. 2022, section 2.3) of x0 (N, ...), picture by picture.

    s is the quantile `ratio` of |x0| in [1, maximum]; x0 is clamped to [-s, s] and divided by s.
    """
    # torch.quantile refuses pictures of more than 2^24 elements, kthvalue torch's deterministic mode
    magnitude = x0.abs().flatten(1).sort(dim=1).values
    rank = ratio * (magnitude.shape[1] - 1)
    low, high = magnitude[:, math.floor(rank)], magnitude[:, math.ceil(rank)]
    s = torch.lerp(low, high, rank - math.floor(rank)).clamp(1, maximum)
    s = s.view(-1, *[1] * (x0.ndim - 1))
    return x0.clamp(-s, s) / s


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al. 2011): four counter words and two key words to four random words.

    Words are uint32 values held in int64 tensors, which broadcast. The integers of Random123 and of `tl.philox`.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        # an int64 product wraps modulo 2^64, so all of its bits are those of the unsigned product
        product0, product1 = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c2 = (product1 >> 32) & MASK32 ^ c1 ^ k0, (product0 >> 32) & MASK32 ^ c3 ^ k1
        c1, c3 = product1 & MASK32, product0 & MASK32
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK32, (k1 + PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def philox_normal(seeds: Tensor, step: int | Tensor, shape: Sequence[int]) -> Tensor:
    """Unit normal noise of a step for pictures of `shape`, each from its own seed.

    seeds  (N,) int64, the bits of a 64-bit key each
    step   index of the step, 0 to 2^32 - 1: an int or an int64 scalar tensor on the seeds' device
    shape  of one picture, (H, W, C): element e of it, counted in that order, is word e % 4 of counter (e // 4, step)

    Returns (N, *shape) float32. Raises ValueError where the seeds are not (N,) int64.
    """
    if seeds.dtype != torch.int64 or seeds.ndim != 1:
        raise ValueError(f"seeds are {seeds.dtype} of shape {tuple(seeds.shape)}; they are (N,) int64")
    elements = math.prod(shape)
    zero = seeds.new_zeros(1, 1)
    counter = (torch.arange(-(-elements // 4), device=seeds.device)[None], zero + step, zero, zero)
    key = (seeds[:, None] & MASK32, (seeds[:, None] >> 32) & MASK32)
    words = torch.stack(philox4x32(counter, key), dim=-1)  # (N, elements / 4, 4)
    return _box_muller(words).flatten(1)[:, :elements].reshape(-1, *shape)


def _box_muller(words: Tensor) -> Tensor:
    """Two pairs of uint32 words to two pairs of unit normals: (..., 4) int64 to (..., 4) float32."""
    # in (0, 1] as cuRAND's uniforms: 2^-33 keeps the logarithm finite
    uniform = words.to(torch.float32) * 2.0**-32 + 2.0**-33
    # in float64, so that the rounded results hardly ever depend on a device's logarithm, sine and cosine
    radius, angle = uniform.to(torch.float64).unflatten(-1, (2, 2)).unbind(-1)
    radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2).to(torch.float32)


@denoise_step.kernel
def _denoise_step_triton(
    model_output,
    x_t,
    row,
    options=StepOptions(),
    *,
    noise=None,
    unguided=None,
    guidance_scale=1.0,
    step=None,
    out=None,
):
    _check_arguments(model_output, x_t, row, options, noise, unguided, step, out)
    inputs = [
        None if tensor is None else tensor.contiguous() for tensor in (model_output, unguided, x_t, row, step, noise)
    ]
    if options.threshold_ratio is not None:
        return Declined("the quantile of dynamic thresholding is a sort")
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in inputs):
        return Declined("torch.float64 has no kernel")
    if out is None:
        out = StepBuffers(torch.empty_like(inputs[2]), torch.empty_like(inputs[2]))
    images, channels = x_t.shape[0], x_t.shape[-1]
    elements = x_t.numel() // images
    copies = len(out.model_input) // images if out.model_input is not None else 0
    block = 512
    launch(
        denoise_kernel, (images * triton.cdiv(elements, block),),
        *out, *inputs, images, elements, channels, copies, guidance_scale, options.clip_range,
        COLUMNS=len(COLUMNS), VARIANCE=options.variance, BLOCK=block, num_warps=4, fp_fusion=False,
    )  # fmt: skip
    return out.x_prev, out.x0


def _check_arguments(
    model_output: Tensor,
    x_t: Tensor,
    row: Tensor,
    options: StepOptions,
    noise: Tensor | None,
    unguided: Tensor | None,
    step: Tensor | None,
    out: StepBuffers | None,
) -> None:
    if x_t.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x_t is {x_t.dtype}; it is float32 (or float64)")
    if x_t.ndim < 1:
        raise ValueError("x_t is a scalar; its shape is (N, ..., C)")
    shape, width = tuple(x_t.shape), len(COLUMNS)
    output_shape = (*shape[:-1], (1 if options.variance == "fixed" else 2) * shape[-1])
    check = partial(_check_tensor, x_t, f"with x_t {shape} and {options.variance} variance")
    check("model_output", model_output, [output_shape])
    check("unguided", unguided, [output_shape])
    check("row", row, [(width,) if step is None else (len(row), width)], torch.float32)
    check("step", step, [(1,)], torch.int32)
    if step is not None and noise is not None and noise.dtype == torch.int64:
        check("noise", noise, [shape[:1]], torch.int64)
    else:
        check("noise", noise, [shape])
    if out is not None:
        check("out.x_prev", out.x_prev, [shape], x_t.dtype)
        check("out.x0", out.x0, [shape], x_t.dtype)
        check("out.model_input", out.model_input, [shape, (2 * shape[0], *shape[1:])])
        if not all(buffer is None or buffer.is_contiguous() for buffer in out):
            raise ValueError("out has a buffer that is not contiguous")


def _check_tensor(
    x_t: Tensor,
    setting: str,
    name: str,
    tensor: Tensor | None,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype | None = None,
) -> None:
    """Raises ValueError unless `tensor` is None or of one of the shapes, of `dtype` (None: any float), beside x_t."""
    if tensor is None:
        return
    if tensor.dtype != dtype if dtype is not None else not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}; it is {dtype or 'a float dtype'}")
    if tuple(tensor.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {setting} it is {' or '.join(map(str, shapes))}")
    if tensor.device != x_t.device:
        raise ValueError(f"{name} is on {tensor.device}; x_t is on {x_t.device}")
