"""The tiles and launches of the products in `linear`, `swiglu` and `geglu` on sm_90."""

from typing import NamedTuple

from torch import Tensor

from fastdiff.kernels.host.launching import (
    gluon_descriptor,
    launch,
    multiprocessors,
    side_by_side,
    suits_descriptors,
)
from fastdiff.kernels.host.recording import because
from fastdiff.kernels.host.weights import FP8, Factors, Quantised, Scaled, Weight

TOKENS = 128  # of a tile, which two warp groups compute
STEP = 128  # bytes of a row in a step: 64 input channels, or 128 in fp8
STAGES = 6  # most steps in shared memory
MEMORY = 226 * 1024  # bytes for the steps and the stored output
GROUP_M = 8  # rows of tiles that reuse the same weights from L2
SINGLE_WIDTHS = ((64, 32), (128, 0), (128, 16), (128, 32), (128, 64))
# (two products, fp8) -> output channels of a tile, in two parts. With two products, each has half of the channels.
WIDTHS = {
    (False, False): SINGLE_WIDTHS,
    (True, False): ((128, 0),),
    (False, True): (*SINGLE_WIDTHS, (128, 128)),
    (True, True): ((128, 0), (128, 64), (128, 128)),
}
# In fp8 both warp groups share a tile. But if a program has at least FEWEST_OWN tiles of width OWN, each warp group has
# its own tile, and runs its epilogue while the other multiplies: on one H200, in 0.87 to 1.03 of the time.
OWN, FEWEST_OWN = (128, 0), 4
# The kernel needs more tiles of this many output channels than programs. Fewer tiles would wait for one product after
# another, so they are left to the generic kernel, which runs several programs on a multiprocessor.
NARROW = {False: 80, True: 64}


class ProductTiles(NamedTuple):
    """The tiles of an output: how its tokens and channels are divided."""

    parts: tuple[int, int]  # channels in the two parts of a tile
    down: int
    across: int
    turns: bool  # whether the warp groups of a program take turns, each with its own tiles
    dual: bool = False  # whether a tile has two products, each with half of the channels
    fp8: bool = False

    @property
    def number(self) -> int:
        return self.down * self.across

    @property
    def stored(self) -> tuple[int, int, int]:
        """The tokens that a warp group stores at a time, and the channels of each part."""
        most = 64 if self.turns or self.fp8 else 128
        first, second = (min(part // (1 + self.dual), most) for part in self.parts)
        return TOKENS if self.turns and not self.fp8 else TOKENS // 2, first, second

    @property
    def stages(self) -> int:
        """The number of steps in shared memory; per warp group in fp8, if each warp group has its own tiles."""
        rows, first, second = self.stored
        stored, rings = 2 * rows * (first + second) * 2, 2 if self.turns and self.fp8 else 1
        return min(STAGES, (MEMORY - stored) // (rings * (TOKENS + sum(self.parts)) * STEP))


def fills(tokens: int, out_channels: int, programs: int, *, dual: bool = False) -> bool:
    """Whether the tiles of an output keep all programs busy. If not, the generic kernel runs."""
    return -(-tokens // TOKENS) * -(-out_channels // NARROW[dual]) > programs


def cut(tokens: int, out_channels: int, programs: int, *, dual: bool = False, fp8: bool = False) -> ProductTiles:
    """Return the tiles with the least estimated time: a tile's time is proportional to the operands that it loads.

    Args:
        dual: whether there are two products.
    """
    down = -(-tokens // TOKENS)

    def tiles(parts: tuple[int, int]) -> ProductTiles:
        across = -(-out_channels // (sum(parts) // (1 + dual)))
        turns = parts == OWN and down * across >= FEWEST_OWN * programs if fp8 else dual or down * across > programs
        return ProductTiles(parts, down, across, turns, dual, fp8)

    own = tiles(OWN)
    if fp8 and own.turns:
        return own
    return min(map(tiles, WIDTHS[dual, fp8]), key=lambda each: -(-each.number // programs) * (TOKENS + sum(each.parts)))


def obstacle(x: Tensor | Scaled, weight: Weight, out_channels: int) -> str | None:
    """Return why the kernel cannot take these tensors; None if it can."""
    loaded = [weight.values if isinstance(weight, Quantised) else weight]
    if isinstance(x, Tensor) and weight.dtype != FP8:  # the fp8 copy of x gets rows as long as the weight's
        loaded.append(_rows(x))
    aligned = all(map(suits_descriptors, loaded)) and out_channels % 8 == 0
    return None if aligned else "rows are not contiguous, or not aligned to 16 bytes"


def _rows(x: Tensor) -> Tensor:
    """Return x (N, L, C) as (N L, C), with contiguous channels."""
    return side_by_side(x.reshape(-1, x.shape[-1]))


def fills_card(tokens: int, weight: Weight, *, dual: bool = False) -> bool:
    """Whether the product of `tokens` and a weight (C_out, C_in), or (2 C_out, C_in) if `dual`, keeps the card busy."""
    return fills(tokens, weight.shape[0] // (1 + dual), multiprocessors(weight.device), dual=dual)


def tiles_of(tokens: int, weight: Weight, *, dual: bool = False) -> ProductTiles:
    """Return the tiles for the product of `tokens` and a weight (C_out, C_in), or (2 C_out, C_in) if `dual`."""
    out_channels, fp8 = weight.shape[0] // (1 + dual), weight.dtype == FP8
    return cut(tokens, out_channels, multiprocessors(weight.device), dual=dual, fp8=fp8)


def launch_tiles(
    tiles: ProductTiles,
    y: Tensor,
    factors: Factors,
    bias: Tensor | None,
    *,
    activation: str | None = None,
    activation2: str | None = None,
    residual: Tensor | None = None,
) -> None:
    """Write activation(x weight^T + bias) + residual, (N, L, C_out), into y.

    Args:
        activation2: the activation of the second product, if there are two.
    """
    from fastdiff.kernels.device.hopper.linear import hopper_linear_kernel  # imports Gluon

    x, y, weight = _rows(factors.x), _rows(y), factors.weight
    (tokens, channels), out_channels = x.shape, y.shape[1]
    bias, residual = side_by_side(bias), None if residual is None else residual.contiguous()
    first, second = tiles.parts
    how = "apart" if tiles.turns and tiles.fp8 else "in turn" if tiles.turns else "together"
    because(lambda: f"Gluon, {TOKENS} tokens x {first} + {second} channels a tile, two warp groups {how}")
    rows, *columns = tiles.stored
    step = STEP // x.itemsize
    launch(
        hopper_linear_kernel, (min(tiles.number, multiprocessors(x.device)),),
        *(gluon_descriptor(y, [rows, width or columns[0]]) for width in columns),
        gluon_descriptor(x, [TOKENS, step]),
        *(gluon_descriptor(weight, [(width or first) // (1 + tiles.dual), step]) for width in tiles.parts),
        factors.x_scale, factors.scale, bias, residual, tokens, channels, out_channels, tiles.down, tiles.across,
        ACTIVATION=activation or "none", ACTIVATION2=activation2 or "none", B1=first, B2=second, BK=step,
        STAGES=tiles.stages, TURNS=tiles.turns, DUAL=tiles.dual, GROUP_M=GROUP_M, num_warps=4,
    )  # fmt: skip
