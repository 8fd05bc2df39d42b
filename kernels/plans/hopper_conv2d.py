"""The launch of the Gluon convolution kernel on sm_90: the supported shapes, their tiles and descriptors.

Whether the kernel supports a shape, and the moments tiles, affect the bits, so they depend only on the picture's shape.
The tiles depend on the batch too, and do not affect the bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.kernels.host.launching import gluon_descriptor, launch, multiprocessors, suits_descriptors
from fastdiff.kernels.host.moments import Moments
from fastdiff.kernels.host.recording import because
from fastdiff.kernels.plans.conv2d_problem import Problem

FEWEST_CHANNELS = 32  # of the input and output
WIDTH, CHANNELS = 16, 64  # columns and channels of a tile
SWIZZLED = 128  # bytes of the channels in a step
# Rows of a tile -> shared-memory buffers for loads and for weights (three per load where they fit), and the time of a
# tile in units of 8 x 16 pixels. Measured on an H200.
BUFFERS = {16: (3, 6), 8: (4, 12)}
COSTS = {16: 2.0, 8: 1.06}
HALF_ROUND = 0.55  # relative time of a round in which all tiles are halves
FP8_ROWS, FP8_BUFFERS = 16, (3, 9)  # the same for fp8, whose tiles have one height: chosen, not measured


class ConvTiles(NamedTuple):
    """The tiles of an output: first `whole` tiles of `rows` rows, then tiles with half as many rows."""

    rows: int
    whole: int
    number: int

    @property
    def halves(self) -> bool:
        return self.number > self.whole


class ConvTensors(NamedTuple):
    """The contiguous tensors that the kernel reads."""

    parts: tuple[Tensor, ...]  # (N, H, W, C) each
    weight: Tensor  # (C_out, kH, kW, C_in)
    dtype: torch.dtype  # of the output
    residual: Tensor | None = None  # (N, H_out, W_out, C_out)
    shortcut: tuple[Tensor, ...] = ()  # one or two tensors (N, H_out, W_out, C)
    shortcut_weight: Tensor | None = None  # (C_out, C)
    shortcut_bias: Tensor | None = None
    scales: tuple[Tensor | None, Tensor | None] = None, None  # in 8 bits: for the weight (C_out,), for the parts (N,)

    def obstacle(self) -> str | None:
        """Return why the copy engine cannot read the tensors; None if it can."""
        read = (*self.parts, self.weight, self.residual, *self.shortcut, self.shortcut_weight)
        suited = all(suits_descriptors(tensor) for tensor in read if tensor is not None)
        return None if suited else "rows are not aligned to 16 bytes"


def has(problem: Problem, *, shortcut: bool, int8: bool) -> bool:
    """Whether the kernel supports a convolution of these sizes: 3x3, channels a multiple of 16 bytes.

    Args:
        shortcut: whether a 1x1 shortcut is added. Not supported with int8, because the weight's scales would apply to
            the shortcut in the same sum.
        int8: whether the weight is int8.
    """
    widths = (*problem.channels, problem.out_channels)
    if problem.kernel != (3, 3) or problem.itemsize != 2 or min(widths) < FEWEST_CHANNELS or (shortcut and int8):
        return False
    units = (16 // problem.x_itemsize,) * len(problem.channels) + (8,)  # elements in 16 bytes
    if any(width % unit for width, unit in zip(widths, units, strict=True)) or problem.padding != (1, 1, 1, 1):
        return False
    if problem.mode == "up":  # a block of channels would reach into the next pixel's
        return problem.out_channels % CHANNELS == 0 and not shortcut
    return problem.mode == "same"


def grid_of(problem: Problem) -> tuple[int, int]:
    """Return the rows and columns of the tiled grid: the output pixels, or a quarter of them for upsampling."""
    shift = problem.mode == "up"
    return problem.out_height >> shift, problem.out_width >> shift


def moments_pixels(problem: Problem) -> int | None:
    """Return the pixels of a moments tile, which is 16 columns wide; None if such tiles do not divide a picture."""
    rows, columns = grid_of(problem)
    fitting = [pixels for pixels in (128, 64) if rows % (pixels // WIDTH) == 0 and columns % WIDTH == 0]
    if problem.pixels <= 64 * 64:
        fitting.reverse()
    return fitting[0] if fitting else None


def cut(problem: Problem, multiprocessors: int) -> ConvTiles:
    """Return the tiles with the least estimated time, in rounds of the multiprocessors.

    The last round may consist of half tiles.
    """
    rows, columns = grid_of(problem)
    columns_of_tiles = problem.pictures * -(-columns // WIDTH) * _across(problem)
    found: list[tuple[float, ConvTiles]] = []
    costs = {FP8_ROWS: COSTS[FP8_ROWS]} if problem.fp8 else COSTS
    for height, cost in costs.items():
        count = whole = columns_of_tiles * -(-rows // height)
        rounds: float = -(-count // multiprocessors)
        rest = count % multiprocessors
        half = height // 2 // _warpgroups(problem) * WIDTH  # pixels of a warp group
        if 0 < 2 * rest <= multiprocessors and half >= (moments_pixels(problem) or 0):
            whole, rounds = count - rest, count // multiprocessors + HALF_ROUND
        found.append((rounds * cost, ConvTiles(height, whole, 2 * count - whole)))
    return min(found, key=lambda each: each[0])[1]


def _warpgroups(problem: Problem) -> int:
    """Return the number of warp groups that share the rows of a tile."""
    return 2 if problem.fp8 else 1


def _across(problem: Problem) -> int:
    """Return the number of tiles across the channels. Upsampling doubles it: left pixels and right pixels."""
    return -(-problem.out_channels // CHANNELS) << (problem.mode == "up")


def convolve(
    problem: Problem,
    inputs: ConvTensors,
    epilogue: tuple[Tensor | None, Tensor | None, int, float | None],
    measured: bool,
) -> tuple[Tensor, Moments | None]:
    """Return y and its moments; None for the moments if `measured` is False or their tiles do not divide a picture.

    Args:
        epilogue: bias, temb, the stride of temb's rows, and the scale that is applied after them.
    """
    from fastdiff.kernels.device.hopper.conv2d import hopper_conv  # imports Gluon

    first = inputs.parts[0]
    y = first.new_empty(problem.out_shape, dtype=inputs.dtype)
    pixels = moments_pixels(problem) if measured else None
    moments = None
    if pixels is not None:
        shape = (problem.pictures, problem.pixels // pixels, problem.out_channels)
        mean, m2 = (first.new_empty(shape, dtype=torch.float32) for _ in range(2))
        moments = Moments(mean, m2, pixels)
    processors = multiprocessors(first.device)
    tiles = cut(problem, processors)
    size = f"{tiles.rows * WIDTH} pixels x {CHANNELS} channels"
    because(lambda: f"Gluon, {size} a tile, {tiles.number} tiles")
    bias, temb, temb_stride, scale = epilogue
    rows, columns = grid_of(problem)
    loads, weights = FP8_BUFFERS if problem.fp8 else BUFFERS[tiles.rows]
    w_scale, x_scale = inputs.scales
    launch(
        hopper_conv, (min(tiles.number, processors),), *_outputs(problem, tiles, y, inputs.residual),
        mean=moments and moments.mean, m2=moments and moments.m2, **_sources(problem, tiles, inputs), bias=bias,
        temb=temb, temb_stride=temb_stride, shortcut_bias=inputs.shortcut_bias, scale=scale, w_scale=w_scale,
        x_scale=x_scale, out_channels=problem.out_channels, tiles=tiles.number,
        whole=tiles.whole, across=_across(problem), down=-(-rows // tiles.rows),
        wide=-(-columns // WIDTH), moments_rows=rows * WIDTH // pixels if pixels else 0, MODE=problem.mode,
        TH=tiles.rows, XS=loads, WS=weights, PX=pixels or 0, num_warps=4, fp_fusion=False,
    )  # fmt: skip
    return y, moments


def _blocks(pictures: Tensor | None, rows: int, halves: bool) -> tuple[Any, Any]:
    """Return descriptors of (N, H, W, C) or (N, H / 2, 2, W / 2, 2 C), in blocks of `rows` and of half as many rows.

    Without `halves` the second descriptor is None.
    """
    if pictures is None:
        return None, None
    return _rows(pictures, rows), _rows(pictures, rows // 2) if halves else None


def _rows(pictures: Tensor, height: int) -> Any:
    """Return a descriptor with blocks of `height` rows."""
    return gluon_descriptor(pictures, [1, height, *[1] * (pictures.ndim - 4), WIDTH, SWIZZLED // pictures.itemsize])


def _by_parity(pictures: Tensor) -> Tensor:
    """View (N, H, W, C) as (N, H / 2, 2, W / 2, 2 C), whose blocks have pixels of one parity."""
    n, height, width, _ = pictures.shape
    return pictures.view(n, height // 2, 2, width // 2, -1)


def _outputs(problem: Problem, tiles: ConvTiles, y: Tensor, residual: Tensor | None) -> list[Any]:
    """Return descriptors of the output and the residual, in blocks of a warp group's rows and of half of them."""
    height = tiles.rows // _warpgroups(problem)
    views = [each if each is None or problem.mode != "up" else _by_parity(each) for each in (y, residual)]
    return [block for view in views for block in _blocks(view, height, tiles.halves)]


def _sources(problem: Problem, tiles: ConvTiles, inputs: ConvTensors) -> dict[str, Any]:
    """Return the kernel arguments for the pictures and weights in the sum over k. Unused ones are None."""
    found: dict[str, Any] = {}
    after = 2 if problem.mode == "same" else 1  # rows that a filter reads beyond a tile's
    parts = dict(zip(("x", "x2", "shortcut", "shortcut2"), (*_two(inputs.parts), *_two(inputs.shortcut)), strict=True))
    for name, part in parts.items():
        found[name], found[f"{name}_half"] = _blocks(part, tiles.rows, tiles.halves)
        found[f"{name}_channels"] = None if part is None else part.shape[3]
        if name.startswith("x"):
            found[f"{name}_edge"] = None if part is None else _rows(part, after)
    weight2 = inputs.shortcut_weight
    found["shortcut_w"] = None if weight2 is None else _filters(weight2[:, None])
    return found | {"w": _filters(inputs.weight.flatten(1, 2))}


def _two(parts: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    first, second = (*parts, None, None)[:2]
    return first, second


def _filters(weight: Tensor) -> Any:
    """Return a descriptor of (C_out, taps, C_in) with blocks of one tap."""
    return gluon_descriptor(weight, [CHANNELS, 1, SWIZZLED // weight.itemsize])
