"""How the products of `linear`, `swiglu` and `geglu` are cut on sm_90, and launched."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.kernels.device.hopper.linear import hopper_linear_kernel
from fastdiff.kernels.host.hopper import gluon
from fastdiff.kernels.host.launching import launch, multiprocessors, suits_descriptors
from fastdiff.kernels.host.recording import because

TOKENS = 128  # of a tile, of two warpgroups
STEP = 64  # input channels of a step
STAGES = 6  # steps in shared memory, at most
MEMORY = 226 * 1024  # bytes for them and for what is stored
GROUP = 8  # rows of tiles that share the weights they find in the L2
WIDTHS = ((64, 32), (128, 0), (128, 16), (128, 32), (128, 64))  # output channels of a tile, in two products
DUAL_WIDTHS = ((128, 0),)  # where there are two products: 64 channels of each
# Output channels of tiles that a card may have one of for each program, or fewer. Such few or narrow tiles wait for one
# product after another, and are left to the kernel of all cards, which holds several on a multiprocessor.
NARROW = {False: 80, True: 64}


class Tiles(NamedTuple):
    """Those of an output: its tokens and channels in tiles."""

    parts: tuple[int, int]  # channels of a tile, of either product
    down: int
    across: int
    turns: bool  # whether the warpgroups of a program take turns, each with tiles of its own
    dual: bool = False  # of two products, half of the channels of each

    @property
    def number(self) -> int:
        return self.down * self.across

    @property
    def stored(self) -> tuple[int, int]:
        """Tokens and channels that a warpgroup stores at a time."""
        return (TOKENS, min(self.parts[0], 64)) if self.turns else (TOKENS // 2, self.parts[0] // (1 + self.dual))

    @property
    def stages(self) -> int:
        """Steps in shared memory."""
        rows, columns = self.stored
        stored = 2 * rows * (columns + self.parts[1]) * 2
        return min(STAGES, (MEMORY - stored) // ((TOKENS + sum(self.parts)) * STEP * 2))


def cut(tokens: int, out_channels: int, programs: int, *, dual: bool = False) -> Tiles | None:
    """The tiles that so many programs should be done with first: a tile takes as long as its operands to load.

    dual: of two products. None where there are too few tokens for this kernel.
    """
    down = -(-tokens // TOKENS)
    if down * -(-out_channels // NARROW[dual]) <= programs:
        return None

    def tiles(parts: tuple[int, int]) -> Tiles:
        across = -(-out_channels // (sum(parts) // (1 + dual)))
        return Tiles(parts, down, across, turns=dual or down * across > programs, dual=dual)

    found = map(tiles, DUAL_WIDTHS if dual else WIDTHS)
    return min(found, key=lambda each: -(-each.number // programs) * (TOKENS + sum(each.parts)))


def plan_name(operation: str, shape: torch.Size, *, residual: bool = False) -> str:
    """Name the plan of an operation at a weight's shape."""
    return "{} {} to {}".format(operation, *reversed(shape)) + ", residual" * residual


def obstacle(x: Tensor, weight: Tensor, out_channels: int) -> str | None:
    """Say why the kernel is not launched for these tensors, if it is not."""
    if not (suits_descriptors(x) and suits_descriptors(weight)) or out_channels % 8:
        return "rows are not side by side or aligned to 16 bytes"
    return gluon.obstacle(x.device)


def launch_many(x: Tensor, weight: Tensor, bias: Tensor | None, *, dual: bool = False, **options: Any) -> Tensor | None:
    """Return what `launch_tiles` does, by the tiles that suit x; None where there are too few tokens for them."""
    tiles = tiles_of(x, weight, dual=dual)
    return None if tiles is None else launch_tiles(tiles, x, weight, bias, **options)


def tiles_of(x: Tensor, weight: Tensor, *, dual: bool = False) -> Tiles | None:
    """How the product of x (tokens, C_in) and weight (C_out, C_in), or two C_out, is cut, if it is for this kernel."""
    return cut(x.shape[0], weight.shape[0] // (1 + dual), multiprocessors(x.device), dual=dual)


def launch_tiles(
    tiles: Tiles,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = None,
    activation2: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """activation(x weight^T + bias) + residual, (tokens, C_out), of x (tokens, C_in).

    activation2: of the second product, where the tiles are of two.
    """
    tokens, channels = x.shape
    out_channels = weight.shape[0] // (1 + tiles.dual)
    y = x.new_empty(tokens, out_channels)
    first, second = tiles.parts
    how = "in turn" if tiles.turns else "together"
    because(lambda: f"Gluon, {TOKENS} tokens x {first} + {second} channels a tile, two warpgroups {how}")
    rows, columns = tiles.stored
    launch(
        hopper_linear_kernel, (min(tiles.number, multiprocessors(x.device)),),
        *(gluon.descriptor(y, [rows, width]) for width in (columns, second or columns)),
        gluon.descriptor(x, [TOKENS, STEP]),
        *(gluon.descriptor(weight, [width, STEP]) for width in (first // (1 + tiles.dual), second or first)),
        bias, residual, tokens, channels, out_channels, tiles.down, tiles.across,
        ACTIVATION=activation or "none", ACTIVATION2=activation2 or "none", B1=first, B2=second, BK=STEP,
        STAGES=tiles.stages, TURNS=tiles.turns, DUAL=tiles.dual, GROUP=GROUP, num_warps=4,
    )  # fmt: skip
    return y
