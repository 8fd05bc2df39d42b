"""How the products of `linear`, `swiglu` and `geglu` are cut on sm_90, and launched."""

from typing import Any, NamedTuple

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
# Output channels of a tile, in two products: those of programs with one tile each, and those of programs with several.
ONCE = ((32, 0), (32, 16), (64, 0), (64, 16), (64, 32), (128, 0), (128, 16), (128, 32), (128, 64))
IN_TURN = ((64, 0), (64, 16), (64, 32), (128, 0), (128, 16), (128, 32), (128, 64))
DUAL = ((128, 0),)  # of two products, 64 channels of each


class Tiles(NamedTuple):
    """Those of an output: its tokens and channels in tiles."""

    parts: tuple[int, int]  # channels of a tile, of either product
    down: int
    across: int
    turns: bool  # whether the warpgroups of a program take turns, each with tiles of its own
    dual: bool = False

    @property
    def number(self) -> int:
        return self.down * self.across

    @property
    def stored(self) -> tuple[int, int]:
        """Tokens and channels that a warpgroup stores at a time."""
        return (TOKENS, min(self.parts[0], 64)) if self.turns else (TOKENS // 2, self.parts[0])

    @property
    def stages(self) -> int:
        """Steps in shared memory."""
        rows, columns = self.stored
        stored = 2 * rows * (columns + self.parts[1]) * 2
        return min(STAGES, (MEMORY - stored) // ((TOKENS + sum(self.parts)) * STEP * 2))


def cut(tokens: int, out_channels: int, programs: int, *, dual: bool = False) -> Tiles:
    """The tiles that so many programs should be done with first: a tile takes as long as its operands to load."""
    down = -(-tokens // TOKENS)

    def tiles(parts: tuple[int, int], turns: bool) -> Tiles:
        width = sum(parts) // 2 if dual else sum(parts)
        return Tiles(parts, down, -(-out_channels // width), turns, dual)

    several = [tiles(parts, True) for parts in (DUAL if dual else IN_TURN)]
    once = [] if dual else [found for found in (tiles(parts, False) for parts in ONCE) if found.number <= programs]
    return min(once + several, key=lambda found: -(-found.number // programs) * (TOKENS + sum(found.parts)))


def obstacle(x: Tensor, weight: Tensor, out_channels: int) -> str | None:
    """Say why the kernel is not launched for these tensors, if it is not."""
    if not (suits_descriptors(x) and suits_descriptors(weight)) or out_channels % 8:
        return "rows are not side by side or aligned to 16 bytes"
    return gluon.obstacle(x.device)


def launch_tiles(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = None,
    activation2: str | None = None,
    residual: Tensor | None = None,
    dual: bool = False,
) -> Tensor:
    """activation(x weight^T + bias) + residual, (tokens, C_out), of x (tokens, C_in).

    dual: weight and bias are those of two products, and the second under `activation2` multiplies the first.
    """
    tokens, channels = x.shape
    out_channels = weight.shape[0] // 2 if dual else weight.shape[0]
    processors = multiprocessors(x.device)
    tiles = cut(tokens, out_channels, processors, dual=dual)
    y = x.new_empty(tokens, out_channels)
    first, second = tiles.parts
    how = "in turn" if tiles.turns else "together"
    because(lambda: f"Gluon, {TOKENS} tokens x {first} + {second} channels a tile, two warpgroups {how}")
    (rows, columns), second_or_first = tiles.stored, second or first  # without a second product nothing is read of it

    def blocks(*shape: int) -> Any:
        return gluon.descriptor(weight, [*shape])

    launch(
        hopper_linear_kernel, (min(tiles.number, processors),),
        gluon.descriptor(y, [rows, columns]), gluon.descriptor(y, [rows, second or columns]),
        gluon.descriptor(x, [TOKENS, STEP]), blocks(first // 2 if dual else first, STEP), blocks(second_or_first, STEP),
        bias, residual, tokens, channels, out_channels, tiles.down, tiles.across,
        ACTIVATION=activation or "none", ACTIVATION2=activation2 or "none", B1=first, B2=second, BK=STEP,
        STAGES=tiles.stages, TURNS=tiles.turns, DUAL=dual, GROUP=GROUP, num_warps=4,
    )  # fmt: skip
    return y
