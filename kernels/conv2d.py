"""2-D convolution with the epilogue of a U-Net block: bias, time embedding, residual, and moments for the next norm.

The kernel is a channels-last implicit GEMM. A nearest 2x upsample before it, and the concatenation of a skip
connection, are index arithmetic, so neither is ever materialised.
"""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.kernels.from_int8 import as_loaded
from fastdiff.kernels.group_norm import GroupNormCall, affine_arguments, after_arguments, group_norm
from fastdiff.kernels.host.arrivals import parts_memory
from fastdiff.kernels.host.calls import PartsCall, check_pictures, parts_of
from fastdiff.kernels.host.launching import (
    DTYPES,
    capability,
    descriptor,
    fp8_obstacle,
    has_descriptors,
    launch,
    multiprocessors,
    side_by_side,
)
from fastdiff.kernels.host.moments import Moments
from fastdiff.kernels.host.recording import because
from fastdiff.kernels.host.weights import FP8, INT8, Filters, Quantised, Weight, format_of, plain, weight_memory
from fastdiff.kernels.plans import cpu
from fastdiff.kernels.plans import hopper_conv2d as on_hopper
from fastdiff.kernels.plans.choices import convolution_plan
from fastdiff.kernels.plans.conv2d_problem import Problem
from fastdiff.kernels.plans.conv2d_tiles import SUM_CHANNELS
from fastdiff.kernels.plans.conv2d_tiling import ConvTiling, make_tiling, tuned_tiling
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.kernels.to_fp8 import as_multiplied, to_fp8

NORM_STRIDES = ("norm_scale_stride", "norm_shift_stride", "norm_temb_stride")

Padding = int | tuple[int, int, int, int]  # one width for all sides, or (left, right, top, bottom)
Scales = tuple[Tensor | None, Tensor | None]  # of an 8-bit weight (C_out,), and of an fp8 x (N,)


class Shortcut(NamedTuple):
    """A 1x1 convolution of another input of the output's size: conv_shortcut of diffusers' ResnetBlock2D."""

    x: Tensor | tuple[Tensor, Tensor]  # (N, H_out, W_out, C), or a pair
    weight: Tensor  # (C_out, C, 1, 1)
    bias: Tensor | None = None  # (C_out,)


class Norm(NamedTuple):
    """The GroupNorm, activation and additions after a convolution, as arguments of `kernels.group_norm`."""

    num_groups: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    activation: str = "none"
    scale: Tensor | None = None
    shift: Tensor | None = None
    temb: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Conv2dCall(PartsCall[Tensor | tuple[Tensor, Moments | None]]):
    """(conv(x) + bias + temb + residual or shortcut) / output_scale, as in diffusers' ResnetBlock2D and resamplers.

    Args:
        x: (N, H, W, C_in), float32, float16 or bfloat16; or a pair of such tensors, read as their concatenation over C.
        weight: (C_out, C_in, kH, kW), the dtype of x, or `Quantised`. The fastest memory format is channels-last, or in
            float32 that of `host.weights.k_first`.
        bias: (C_out,), the dtype of x.
        stride: 1 or 2.
        padding: zeros around the picture.
        upsample: repeat each pixel of x 2 x 2 before the convolution (nearest).
        temb: (N, C_out), the dtype of x, added to every pixel; rows may be strided (columns of a wider table).
        residual: (N, H_out, W_out, C_out), the dtype of x.
        shortcut: a 1x1 convolution whose output is added, instead of a residual; the dtype of x.
        output_scale: divides the sum.
        norm: the norm, activation and additions applied to the sum. For a small picture they need no extra launch.
        moments: also return the moments of y, so that the next GroupNorm need not read y to compute them.

    Returns:
        y (N, H_out, W_out, C_out), contiguous, the dtype of x; with `moments`, (y, its Moments or None). The moments
        are those of the float32 values before y is rounded. None means that the norm has to compute them.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    name = "conv2d"

    x: Tensor | tuple[Tensor, Tensor]
    weight: Weight
    bias: Tensor | None = None
    _: KW_ONLY
    stride: int = 1
    padding: Padding = 0
    upsample: bool = False
    temb: Tensor | None = None
    residual: Tensor | None = None
    shortcut: Shortcut | None = None
    output_scale: float = 1.0
    norm: Norm | None = None
    moments: bool = False

    @property
    def problem(self) -> Problem:
        """The sizes of the convolution."""
        pictures, height, width, _ = self.parts[0].shape
        out_channels, _, *kernel = self.weight.shape
        sides = self.padding if isinstance(self.padding, tuple) else (self.padding,) * 4
        return Problem(
            pictures, height, width, tuple(part.shape[3] for part in self.parts), out_channels, (kernel[0], kernel[1]),
            self.stride, sides, self.upsample, self.parts[0].itemsize, fp8=self.weight.dtype == FP8,
        )  # fmt: skip

    def check(self) -> None:
        parts, weight = self.parts, self.weight
        check_pictures(parts)
        if not parts[0].is_floating_point():
            raise ValueError(f"x: {parts[0].dtype} is not a float dtype")
        channels = sum(part.shape[3] for part in parts)
        if weight.ndim != 4 or weight.shape[1] != channels:
            raise ValueError(f"weight: expected (C_out, {channels}, kH, kW), got {tuple(weight.shape)}")
        if self.stride not in (1, 2):
            raise ValueError(f"stride: {self.stride} is not supported; use 1 or 2")
        problem = self.problem
        if min(problem.out_height, problem.out_width) < 1:
            size, kernel = f"{problem.height} x {problem.width}", list(problem.kernel)
            raise ValueError(f"padding: with {self.padding}, {size} pixels are too few for a {kernel} filter")
        self._check_tensors(problem)
        if self.shortcut is not None:
            self._check_shortcut(self.shortcut, problem.out_shape)
        if self.norm is not None and self.moments:
            raise ValueError("moments: the call already applies a norm; leave out moments or norm")

    def _check_tensors(self, problem: Problem) -> None:
        first = self.parts[0]
        row = (problem.out_channels,)
        shapes = {"bias": row, "temb": (problem.pictures, *row), "residual": problem.out_shape}
        optional = {"bias": self.bias, "temb": self.temb, "residual": self.residual}
        for name, tensor in {"x": self.parts[-1], "weight": self.weight, **optional}.items():
            if tensor is None:
                continue
            dtype = first.dtype if isinstance(tensor, Quantised) else tensor.dtype
            if tensor.shape != shapes.get(name, tensor.shape):
                raise ValueError(f"{name}: expected {shapes[name]}, got {tuple(tensor.shape)}")
            if (dtype, tensor.device) != (first.dtype, first.device):
                raise ValueError(f"{name}: {dtype} on {tensor.device}, but x is {first.dtype} on {first.device}")

    def _check_shortcut(self, shortcut: Shortcut, out_shape: tuple[int, ...]) -> None:
        if self.residual is not None:
            raise ValueError("shortcut: it replaces the residual; give only one of them")
        try:
            shape = Conv2dCall(*shortcut).problem.out_shape
        except ValueError as error:
            raise ValueError(f"shortcut: {error}") from None
        if shape != out_shape or shortcut.weight.shape[2:] != (1, 1):
            raise ValueError(f"shortcut: expected a 1x1 convolution with output {out_shape}, got output {shape}")
        weight, x = shortcut.weight, self.parts[0]
        if (weight.dtype, weight.device) != (x.dtype, x.device):
            raise ValueError(f"shortcut: {weight.dtype} on {weight.device}, but x is {x.dtype} on {x.device}")

    def reference(self) -> Tensor | tuple[Tensor, Moments | None]:
        weight, options = plain(self.weight, self.parts[0].dtype), (self.stride, self.padding, self.upsample)
        x, *second = as_multiplied(self.x, self.weight)
        if second and weight.shape[2:] == (1, 1) and cpu.by_onednn(x):  # one product is faster
            x, second = torch.cat([x, *second], dim=-1), []
        channels, temb = x.shape[-1], self.temb
        bias, y = self.bias, self.residual if self.shortcut is None else _only(conv2d.reference(*self.shortcut))
        if temb is not None and (len(temb) == 1 or temb.stride(0) == 0):  # the same row for all pictures
            bias, temb = temb[0] if bias is None else bias + temb[0], None
        y = cpu.convolve(x, weight[:, :channels], bias, *options, added=y)
        for x in second:
            y = cpu.convolve(x, weight[:, channels:], None, *options, added=y)
        if temb is not None:
            y += temb[:, None, None, :]
        y = y if self.output_scale == 1.0 else y.div_(self.output_scale)
        if self.norm is not None:
            y = group_norm.reference(y, **self.norm._asdict())
        return (y, None) if self.moments else y

    def obstacle(self) -> str | None:
        dtype = self.parts[0].dtype
        if dtype not in DTYPES:
            return f"no kernel for {dtype}"
        if self.weight.dtype == FP8 and (reason := fp8_obstacle(self.device)) is not None:
            return reason
        return None if self.problem.fits_int32 else "empty batch, or a picture of 2^31 elements or more"

    def kernel(self) -> Tensor | tuple[Tensor, Moments | None]:
        problem, device, shortcut = self.problem, self.device, self.shortcut
        y = torch.empty(problem.out_shape, dtype=self.parts[0].dtype, device=device)
        parts, filters, scales = self._factors()
        after = None if self.norm is None else GroupNormCall(y, **self.norm._asdict())
        if after is not None:
            problem = replace(problem, group=problem.out_channels // after.num_groups)
        bias, residual = (None if tensor is None else tensor.contiguous() for tensor in (self.bias, self.residual))
        residual2 = None if self.norm is None or self.norm.residual is None else self.norm.residual.contiguous()
        loaded = tuple(tensor for tensor in (*parts, filters.values, residual, residual2) if tensor is not None)
        tiling = make_tiling(problem, obstacle=_descriptor_obstacle(loaded), multiprocessors=multiprocessors(device))
        tiling = tuned_tiling(tiling.on(device, problem), problem, self)
        if shortcut is not None and not _fuses(problem, tiling, shortcut):
            residual, shortcut = _only(conv2d(*shortcut)), None
        normed = after is not None and tiling.normalises(problem)
        because(lambda: tiling.describe() + normed * ", norm in its epilogue")
        moments = _empty_moments(problem, tiling, device) if self.moments or (after and not normed) else None
        outputs = (y, None if moments is None else (moments.mean, moments.m2))
        epilogue = _epilogue(bias, self.temb, self.output_scale)
        if tiling.stores_chunks:
            partial = torch.empty(tiling.chunks, *problem.out_shape, dtype=torch.float32, device=device)
            _launch_products(problem, tiling, (partial, None), parts, filters, (None, None), _epilogue(), None)
            _launch_sum(problem, tiling, outputs, partial, scales, epilogue, residual)
        else:
            after = after if normed else None
            _launch_products(problem, tiling, outputs, parts, filters, scales, epilogue, residual, shortcut, after)
        if self.norm is not None and not normed:
            return group_norm(y, moments=moments, **self.norm._asdict())
        return (y, moments) if self.moments else y

    def facts(self) -> dict[str, Any]:
        problem, shortcut = self.problem, self.shortcut is not None
        has = on_hopper.has(problem, shortcut=shortcut, int8=self.weight.dtype == INT8)
        return {
            "filter": "3x3" if has else "another", "mode": problem.mode, "pixels": problem.pixels,
            "channels": sum(problem.channels), "shortcut": shortcut, "format": format_of(self.weight),
            "bits": 8 * problem.itemsize,
        }  # fmt: skip

    def hopper_plan(self) -> str | None:
        given = self.facts()
        names = ("mode", "pixels", "channels", "shortcut", "format")
        return convolution_plan(**{name: given[name] for name in names}) if given["filter"] == "3x3" else None

    def hopper_obstacle(self) -> str | None:
        return self._hopper_inputs(self.parts, weight_memory(self.weight), (None, None)).obstacle()

    def hopper(self) -> Tensor | tuple[Tensor, Moments | None]:
        bias, measured = side_by_side(self.bias), self.moments or self.norm is not None
        epilogue = _epilogue(bias, self.temb, self.output_scale)
        y, moments = on_hopper.convolve(self.problem, self._hopper_inputs(*self._factors()), epilogue, measured)
        if self.norm is not None:
            return group_norm(y, moments=moments, **self.norm._asdict())
        return (y, moments) if self.moments else y

    def _factors(self) -> tuple[tuple[Tensor, ...], Filters, Scales]:
        """Return the parts of x and the weight as kernels load them. An fp8 weight needs fp8 parts, made here."""
        parts, filters = tuple(part.contiguous() for part in self.parts), weight_memory(self.weight)
        filters = filters._replace(values=as_loaded(filters.values, parts[0].dtype))
        if self.weight.dtype != FP8:
            return parts, filters, (filters.scale, None)
        scaled = to_fp8(parts)
        return tuple(part.values for part in scaled), filters, (filters.scale, scaled[0].scale)

    def _hopper_inputs(self, parts: tuple[Tensor, ...], filters: Filters, scales: Scales) -> on_hopper.ConvTensors:
        residual = None if self.residual is None else self.residual.contiguous()
        parts = tuple(part.contiguous() for part in parts)
        inputs = on_hopper.ConvTensors(parts, filters.values, self.parts[0].dtype, residual, scales=scales)
        if self.shortcut is None:
            return inputs
        pictures = tuple(part.contiguous() for part in parts_of(self.shortcut.x))
        weight2 = self.shortcut.weight.flatten(1).contiguous()
        return inputs._replace(shortcut=pictures, shortcut_weight=weight2, shortcut_bias=self.shortcut.bias)


conv2d = Operation("conv2d", Conv2dCall)


def _only(y: Tensor | tuple[Tensor, Moments | None]) -> Tensor:
    """Return the output of a convolution that returns no moments."""
    return y if isinstance(y, Tensor) else y[0]


def _descriptor_obstacle(loaded: tuple[Tensor, ...]) -> str | None:
    """Say why tensor descriptors cannot load these tensors at any size, or return None."""
    if not has_descriptors(loaded[0].device):
        return "sm_{}{}".format(*capability(loaded[0].device))
    if any(tensor.itemsize == 1 and tensor[0].numel() % 16 for tensor in loaded):
        return "the 8-bit weights of a channel are not a multiple of 16 bytes"
    return None if all(each.data_ptr() % 16 == 0 for each in loaded) else "an address is not a multiple of 16 bytes"


def _fuses(problem: Problem, tiling: ConvTiling, shortcut: Shortcut) -> bool:
    """Whether the shortcut joins the sum over k. For aligned, contiguous tensors only the picture's shape decides."""
    parts = parts_of(shortcut.x)
    fits = tiling.descriptors and not tiling.apart and problem.mode == "same" and problem.out_channels > 16
    fits = fits and problem.itemsize == 2
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (*parts, shortcut.weight))
    return fits and aligned and all(part.shape[3] % 8 == 0 and part.is_contiguous() for part in parts)


def _epilogue(bias: Tensor | None = None, temb: Tensor | None = None, output_scale: float = 1.0) -> tuple[Any, ...]:
    """Return bias, temb, the stride of temb and the final factor, as the kernels take them."""
    temb = side_by_side(temb)
    return bias, temb, 0 if temb is None else temb.stride(0), None if output_scale == 1.0 else 1 / output_scale


def _empty_moments(problem: Problem, tiling: ConvTiling, device: torch.device) -> Moments:
    shape = (problem.pictures, tiling.moments_tiles(problem), problem.out_channels)
    mean, m2 = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    return Moments(mean, m2, tiling.moments)


def _launch_products(
    problem: Problem, tiling: ConvTiling, outputs: tuple[Any, ...], parts: tuple[Tensor, ...], filters: Filters,
    scales: Scales, epilogue: tuple[Any, ...], residual: Tensor | None, shortcut: Shortcut | None = None,
    norm: GroupNormCall | None = None,
) -> None:  # fmt: skip
    """Launch a program per tile, or one for each part of its sum, which the last to arrive or `sum_chunks` adds."""
    from fastdiff.kernels.device.conv2d import conv_by_descriptors, conv_by_pointers  # imports Triton

    weight, tile, (left, _, top, _) = filters.values, tiling.tile, problem.padding
    pictures, tile_height, tile_width = tiling.tile_shape
    grid = tiling.programs(problem), tiling.parts(problem) + (shortcut is not None) if tiling.spread else 1
    arguments: dict[str, Any] = dict(
        epilogue=epilogue, **_norm_arguments(problem, tiling, norm), pictures=problem.pictures, rows=tiling.rows,
        pixels=problem.pixels, pad_top=top, pad_left=left, steps=tiling.steps, channels=problem.channels[0],
        channels2=sum(problem.channels[1:]), out_channels=problem.out_channels,
        KH=problem.kernel[0], KW=problem.kernel[1], MODE=problem.mode, SWAP=tile.swap, BI=pictures, BH=tile_height,
        BW=tile_width, BN=tile.channels, BK=tile.block, CHUNKS=1 if tiling.stores_chunks else tiling.chunks,
        num_warps=tile.warps, num_stages=tile.stages, fp_fusion=False,
    )  # fmt: skip
    memory = parts_memory(*grid, tile.pixels * tile.channels, weight.device) if tiling.arrives else (None, None)
    if tiling.stores_by_descriptor(problem):
        outputs = _output_descriptor(problem, tiling, outputs[0]), outputs[1]
    if not tiling.descriptors:
        x, x2 = (*parts, None)[:2]
        sizes: dict[str, Any] = dict(height=problem.height, width=problem.width, out_width=problem.out_width)
        flags: dict[str, Any] = dict(FLAT=tiling.flat, K_FIRST=filters.is_k_first, RAGGED=tiling.ragged(problem))
        launch(conv_by_pointers, grid, *outputs, x, x2, weight, scales, residual, **arguments, **sizes, **flags)
        return
    if residual is not None and tiling.residual_by_descriptor(problem):
        residual = _output_descriptor(problem, tiling, residual)
    x, x2 = (*_input_descriptors(problem, tiling, parts), None)[:2]
    launch(
        conv_by_descriptors, grid, *outputs, *memory, x, x2, descriptor(weight.flatten(1), [tile.channels, tile.block]),
        weight, scales, residual, **arguments, **_shortcut_arguments(problem, tiling, shortcut), columns=tiling.columns,
        MOMENTS=tiling.moments, APART=tiling.stores_chunks,
    )  # fmt: skip


def _shortcut_arguments(problem: Problem, tiling: ConvTiling, shortcut: Shortcut | None) -> dict[str, Any]:
    names = ("shortcut_desc", "shortcut2_desc", "shortcut_w_desc", "shortcut")
    block = tiling.tile.block // 2 if problem.fp8 else tiling.tile.block  # equal bytes: a shortcut is 16-bit
    if shortcut is None:
        return dict.fromkeys(names[:3]) | {"shortcut": (None, None, None), "SHORTCUT_BK": block}
    parts = parts_of(shortcut.x)
    x, x2 = (*(descriptor(part, [*tiling.tile_shape, block]) for part in parts), None)[:2]
    weight = descriptor(shortcut.weight.flatten(1), [tiling.tile.channels, block])
    rest = shortcut.bias, parts[0].shape[3], sum(part.shape[3] for part in parts[1:])
    return dict(zip(names, (x, x2, weight, rest), strict=True)) | {"SHORTCUT_BK": block}


def _norm_arguments(problem: Problem, tiling: ConvTiling, norm: GroupNormCall | None) -> dict[str, Any]:
    if norm is None:
        nothing = dict.fromkeys(("norm_temb", "norm_residual")) | dict.fromkeys(NORM_STRIDES, 0)
        return nothing | {"norm": (None,) * 5, "NORM": 0, "ACTIVATION": "none"}
    arguments = affine_arguments(norm) | after_arguments(norm)
    if arguments["residual"] is not None and tiling.residual_by_descriptor(problem):
        arguments["residual"] = _output_descriptor(problem, tiling, arguments["residual"])
    prefixed = {name if name == "norm" else f"norm_{name}": value for name, value in arguments.items()}
    return prefixed | {"NORM": problem.group, "ACTIVATION": norm.activation}


def _input_descriptors(problem: Problem, tiling: ConvTiling, parts: tuple[Tensor, ...]) -> list[Any]:
    pictures, height, width = tiling.tile_shape
    if problem.mode == "down":  # pixels of one parity are a block of (N, H / 2, 2, W / 2, 2 C)
        rows = 1 if problem.row else 2
        parts = tuple(part.view(part.shape[0], part.shape[1] // rows, rows, part.shape[2] // 2, -1) for part in parts)
        return [descriptor(part, [pictures, height, 1, width, tiling.tile.block]) for part in parts]
    return [descriptor(part, [pictures, height, width, tiling.tile.block]) for part in parts]


def _output_descriptor(problem: Problem, tiling: ConvTiling, y: Tensor) -> Any:
    pictures, height, width = tiling.tile_shape
    if problem.mode == "up" and tiling.descriptors:  # pixels of a quarter are a block of (N, H / 2, 2, W / 2, 2 C)
        y = y.view(problem.pictures, tiling.rows, 2, tiling.columns, -1)
        return descriptor(y, [pictures, height, 1, width, tiling.tile.channels])
    y = y.view(problem.pictures, tiling.rows, tiling.columns, problem.out_channels)
    return descriptor(y, [pictures, height, width, tiling.tile.channels])


def _launch_sum(
    problem: Problem, tiling: ConvTiling, outputs: tuple[Any, ...], partial: Tensor, scales: Scales,
    epilogue: tuple[Any, ...], residual: Tensor | None,
) -> None:  # fmt: skip
    from fastdiff.kernels.device.conv2d import sum_chunks  # imports Triton

    tile = tiling.moments_tile
    grid = (problem.pictures * tiling.moments_tiles(problem) * -(-problem.out_channels // SUM_CHANNELS),)
    launch(
        sum_chunks, grid, *outputs, partial, scales, residual, epilogue=epilogue, pictures=problem.pictures,
        rows=tiling.rows, columns=tiling.columns, pixels=problem.pixels, out_channels=problem.out_channels,
        CHUNKS=tiling.chunks, MODE=problem.mode if tiling.descriptors else "same", BH=tile[0], BW=tile[1],
        BN=SUM_CHANNELS, MOMENTS=tiling.moments, RAGGED=tiling.ragged(problem), num_warps=4, fp_fusion=False,
    )  # fmt: skip
