"""How a product of few tokens is cut on sm_90, so that its tiles fill the card in one wave, and launched."""

from typing import NamedTuple

from torch import Tensor

from fastdiff.kernels.device.hopper.linear import hopper_linear_kernel
from fastdiff.kernels.host.hopper import gluon
from fastdiff.kernels.host.launching import launch, multiprocessors, suits_descriptors
from fastdiff.kernels.host.recording import because

TOKENS = 128  # of a tile, of two warpgroups
STEP, STAGES = 64, 5  # input channels of a step, and steps in shared memory
# Output channels of a tile, in two products, from narrow to wide. Only (128, 0) and (128, 16) were tried on a card.
WIDTHS = ((32, 0), (32, 16), (64, 0), (64, 16), (128, 0), (128, 16))


class Tiles(NamedTuple):
    """Those of an output: its tokens and channels in tiles."""

    parts: tuple[int, int]  # channels of a tile, of either product
    down: int
    across: int

    @property
    def programs(self) -> int:
        return self.down * self.across


def cut(tokens: int, out_channels: int, programs: int) -> Tiles | None:
    """The narrowest tiles that so many programs make in one wave; None where none divide the channels or are so few."""
    down = -(-tokens // TOKENS)
    widths = (parts for parts in WIDTHS if out_channels % sum(parts) == 0)
    fitting = (Tiles(parts, down, out_channels // sum(parts)) for parts in widths)
    return next((tiles for tiles in fitting if tiles.programs <= programs), None)


def obstacle(x: Tensor, weight: Tensor) -> str | None:
    """Say why the kernel is not launched for these tensors, if it is not."""
    if not (suits_descriptors(x) and suits_descriptors(weight)):
        return "rows are not side by side or aligned to 16 bytes"
    return gluon.obstacle(x.device)


def tiles_of(x: Tensor, weight: Tensor) -> Tiles | None:
    """How the product of x (tokens, C_in) and weight (C_out, C_in) is cut, if its tiles fit the card in one wave."""
    return cut(x.shape[0], weight.shape[0], multiprocessors(x.device))


def launch_tiles(tiles: Tiles, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """activation(x weight^T + bias), (tokens, C_out): a program for each tile."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    first, second = tiles.parts
    because(lambda: f"Gluon, {TOKENS} tokens x {first} + {second} channels a tile")
    columns = first, second or first  # without a second product its descriptors are those of the first
    launch(
        hopper_linear_kernel, (tiles.programs,),
        *(gluon.descriptor(y, [TOKENS // 2, width]) for width in columns), gluon.descriptor(x, [TOKENS // 2, STEP]),
        *(gluon.descriptor(weight, [width, STEP]) for width in columns), bias, x.shape[1], tiles.across,
        ACTIVATION=activation or "none", B1=first, B2=second, BK=STEP, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return y
