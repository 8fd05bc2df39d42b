"""How the products of `linear`, `swiglu` and `geglu` are cut on sm_90, and launched."""

from typing import NamedTuple

from torch import Tensor

from fastdiff.kernels.device.hopper.linear import hopper_linear_kernel
from fastdiff.kernels.host.launching import (
    gluon_descriptor,
    launch,
    multiprocessors,
    side_by_side,
    suits_descriptors,
)
from fastdiff.kernels.host.recording import because
from fastdiff.kernels.host.weights import FP8, Factors, Quantised, Scaled, Weight

TOKENS = 128  # of a tile, of two warpgroups
STEP = 128  # bytes of a row of a step: 64 input channels, in fp8 128
STAGES = 6  # steps in shared memory, at most
MEMORY = 226 * 1024  # bytes for them and for what is stored
GROUP_M = 8  # rows of tiles that share the weights they find in the L2
SINGLE_WIDTHS = ((64, 32), (128, 0), (128, 16), (128, 32), (128, 64))
# (whether there are two products, whether in fp8) -> output channels of a tile, in two parts; each of two products has
# half of them.
WIDTHS = {
    (False, False): SINGLE_WIDTHS,
    (True, False): ((128, 0),),
    (False, True): (*SINGLE_WIDTHS, (128, 128)),
    (True, True): ((128, 0), (128, 64), (128, 128)),
}
# In fp8 both warpgroups share a tile. But where a program has FEWEST_OWN tiles or more of the width OWN, each warpgroup
# has its own, and ends it while the other multiplies: on one H200 in 0.87 to 1.03 of the time.
OWN, FEWEST_OWN = (128, 0), 4
# Output channels of tiles that a card may have one of for each program, or fewer. Such few or narrow tiles wait for one
# product after another, and are left to the kernel of all cards, which holds several on a multiprocessor.
NARROW = {False: 80, True: 64}


class ProductTiles(NamedTuple):
    """The tiles of an output, which cut its tokens and channels."""

    parts: tuple[int, int]  # channels of the two products of a tile
    down: int
    across: int
    turns: bool  # whether the warpgroups of a program take turns, each with tiles of its own
    dual: bool = False  # of two products, half of the channels of each
    fp8: bool = False

    @property
    def number(self) -> int:
        return self.down * self.across

    @property
    def stored(self) -> tuple[int, int, int]:
        """Tokens that a warpgroup stores at a time, and channels of each part."""
        most = 64 if self.turns or self.fp8 else 128
        first, second = (min(part // (1 + self.dual), most) for part in self.parts)
        return TOKENS if self.turns and not self.fp8 else TOKENS // 2, first, second

    @property
    def stages(self) -> int:
        """Steps in shared memory; in fp8, where each warpgroup has its own tiles, of one warpgroup."""
        rows, first, second = self.stored
        stored, rings = 2 * rows * (first + second) * 2, 2 if self.turns and self.fp8 else 1
        return min(STAGES, (MEMORY - stored) // (rings * (TOKENS + sum(self.parts)) * STEP))


def fills(tokens: int, out_channels: int, programs: int, *, dual: bool = False) -> bool:
    """Whether the tiles of an output keep all programs busy; fewer tokens are for the kernel of all cards."""
    return -(-tokens // TOKENS) * -(-out_channels // NARROW[dual]) > programs


def cut(tokens: int, out_channels: int, programs: int, *, dual: bool = False, fp8: bool = False) -> ProductTiles:
    """The tiles that the programs should be done with first: a tile takes as long as its operands take to load.

    dual: of two products.
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
    """Say why the kernel does not take these tensors, if it does not."""
    loaded = [weight.values if isinstance(weight, Quantised) else weight]
    if isinstance(x, Tensor) and weight.dtype != FP8:  # for which it is made with rows as long as the weight's
        loaded.append(_rows(x))
    aligned = all(map(suits_descriptors, loaded)) and out_channels % 8 == 0
    return None if aligned else "rows are not side by side or aligned to 16 bytes"


def _rows(x: Tensor) -> Tensor:
    """x, (N, L, C), as (N L, C), channels side by side."""
    return side_by_side(x.reshape(-1, x.shape[-1]))


def fills_card(tokens: int, weight: Weight, *, dual: bool = False) -> bool:
    """Whether the product of `tokens` and a weight (C_out, C_in), or (2 C_out, C_in), keeps the card busy."""
    return fills(tokens, weight.shape[0] // (1 + dual), multiprocessors(weight.device), dual=dual)


def tiles_of(tokens: int, weight: Weight, *, dual: bool = False) -> ProductTiles:
    """The tiles of the product of `tokens` and a weight (C_out, C_in), or (2 C_out, C_in)."""
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

    activation2: of the second product, where the tiles are of two.
    """
    x, y, weight = _rows(factors.x), _rows(y), factors.weight
    (tokens, channels), out_channels = x.shape, y.shape[1]
    bias, residual = side_by_side(bias), None if residual is None else residual.contiguous()
    first, second = tiles.parts
    how = "apart" if tiles.turns and tiles.fp8 else "in turn" if tiles.turns else "together"
    because(lambda: f"Gluon, {TOKENS} tokens x {first} + {second} channels a tile, two warpgroups {how}")
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
