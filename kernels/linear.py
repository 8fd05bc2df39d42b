"""Linear layers over tokens, fused with RMSNorm before and activation, gate and residual after.

One matrix product and one epilogue: the normalised, activated and gated tokens are never written to memory.
"""

from dataclasses import KW_ONLY, dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.launching import (
    DTYPES,
    descriptor,
    fp8_obstacle,
    has_descriptors,
    launch,
    multiprocessors,
    side_by_side,
    stages_for_two,
    suits_descriptors,
)
from fastdiff.kernels.host.recording import because
from fastdiff.kernels.host.weights import FP8, Quantised, Scaled, Weight, format_of, plain
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.plans import cpu
from fastdiff.kernels.plans import hopper_linear as on_hopper
from fastdiff.kernels.plans.choices import product_plan
from fastdiff.kernels.plans.dispatch import Operation, run
from fastdiff.kernels.plans.tuning import named, tuned
from fastdiff.kernels.to_fp8 import as_multiplied, factors


@dataclass(frozen=True, eq=False)
class LinearCall(Call[Tensor]):
    """activation(x weight^T + bias) * gate + residual, like the projections of diffusers' BasicTransformerBlock.

    Args:
        x: (N, L, C_in), float32, float16 or bfloat16; tokens may be strided. For an fp8 weight it may be `Scaled`;
            otherwise it is quantised first.
        weight: (C_out, C_in), the dtype of x, or `Quantised`. Q, K and V are one linear with 3 C rows, and attention
            reads its output in place.
        bias: (C_out,), the dtype of x.
        activation: None, gelu (erf), gelu_tanh, quick_gelu (x sigmoid(1.702 x), used in CLIP) or silu.
        gate: (N, C_out) of any float dtype, one row for all tokens of a picture: adaLN-Zero (Peebles and Xie 2022,
            arXiv 2212.09748); rows may be strided (columns of a wider table).
        residual: (N, L, C_out), the dtype of x.
        rms_norm: (weight (C_in,) or None, eps): x is RMS-normalised first (Zhang and Sennrich 2019, arXiv 1910.07467).
            Without a norm weight (fold it into `weight`) this is one kernel: the mean square is summed while x streams
            through, and scales the product at the end. On sm_90 two launches are faster in 16 bits.

    Returns:
        (N, L, C_out), contiguous, the dtype of x.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    name = "linear"

    x: Tensor | Scaled
    weight: Weight
    bias: Tensor | None = None
    _: KW_ONLY
    activation: str | None = None
    gate: Tensor | None = None
    residual: Tensor | None = None
    rms_norm: tuple[Tensor | None, float] | None = None

    @property
    def device(self) -> torch.device:
        return self.x.device

    def check(self) -> None:
        x, weight = self.x, self.weight
        if isinstance(x, Scaled) and (weight.dtype != FP8 or self.rms_norm is not None):
            raise ValueError("x: it is in fp8; give an fp8 weight, and no rms_norm")
        if len(x.shape) != 3 or not x.dtype.is_floating_point or x.shape[-1] < 1:
            raise ValueError(f"x: expected floats (N, L, C_in), got {x.dtype} {tuple(x.shape)}")
        n, tokens, channels = x.shape
        if weight.ndim != 2 or weight.shape[1] != channels:
            raise ValueError(f"weight: expected (C_out, {channels}), got {tuple(weight.shape)}")
        if self.activation not in cpu.ACTIVATIONS:
            raise ValueError(f"activation: {self.activation!r} is unknown; use {', '.join(map(str, cpu.ACTIVATIONS))}")
        out_channels = weight.shape[0]
        shapes = {
            "weight": (weight, (out_channels, channels)),
            "bias": (self.bias, (out_channels,)),
            "gate": (self.gate, (n, out_channels)),
            "residual": (self.residual, (n, tokens, out_channels)),
            "rms_norm": (self.rms_norm and self.rms_norm[0], (channels,)),
        }
        for name, (tensor, shape) in shapes.items():
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: expected {shape}, got {tuple(tensor.shape)}")
            if isinstance(tensor, Quantised):
                tensor, fits = tensor.values, True
            else:
                fits = tensor.is_floating_point() if name == "gate" else tensor.dtype == x.dtype
            if not fits or tensor.device != x.device:
                raise ValueError(f"{name}: {tensor.dtype} on {tensor.device}, but x is {x.dtype} on {x.device}")

    def reference(self) -> Tensor:
        x = self.x
        if self.rms_norm is not None:
            assert isinstance(x, Tensor)  # see `check`
            x = _only(layer_norm.reference(x, self.rms_norm[0], eps=self.rms_norm[1], rms=True))
        if self.gate is None:
            return cpu.product(*_multiplied(x, self.weight), self.bias, self.activation, self.residual)
        y = cpu.product(*_multiplied(x, self.weight), self.bias, self.activation) * self.gate[:, None].to(x.dtype)
        return y if self.residual is None else y + self.residual

    def obstacle(self) -> str | None:
        return products_obstacle(self.x, self.weight)

    def facts(self) -> dict[str, Any]:
        extras = {"residual": self.residual is not None, "gate": self.gate is not None, "activation": self.activation}
        return product_facts(self.x, self.weight) | extras | {"norm": self.rms_norm is not None}

    def library(self) -> Tensor:
        return self.reference() if self.rms_norm is None else run(self._normed())

    def hopper_plan(self) -> str | None:
        others = self.rms_norm is not None or self.gate is not None
        return None if others else product_plan_of("linear", self.x, self.weight, residual=self.residual is not None)

    def hopper_obstacle(self) -> str | None:
        fused = "norm" if self.rms_norm is not None else "gate" if self.gate is not None else None
        return f"kernel has no {fused}" if fused else on_hopper.obstacle(self.x, self.weight, self.weight.shape[0])

    def hopper(self) -> Tensor:
        return _by_tiles(self.x, self.weight, self.bias, residual=self.residual, activation=self.activation)

    def kernel(self) -> Tensor:
        weight, eps = self.rms_norm or (None, None)
        if weight is not None or (eps is not None and self.weight.dtype == FP8):  # not in the kernel
            return self._normed().kernel()
        return launch_products(
            self.x, self.weight.unflatten(0, (1, -1)), self.bias, activation=self.activation, gate=self.gate,
            residual=self.residual, rms_eps=eps,
        )  # fmt: skip

    def _normed(self) -> "LinearCall":
        """Return the same call without RMSNorm, after a separate launch for the norm."""
        if self.rms_norm is None:
            return self
        assert isinstance(self.x, Tensor)  # see `check`
        x = _only(layer_norm(self.x, self.rms_norm[0], eps=self.rms_norm[1], rms=True))
        return replace(self, x=x, rms_norm=None)


linear = Operation("linear", LinearCall)


def _only(y: Tensor | Scaled | tuple[Tensor | Scaled, Tensor]) -> Tensor:
    """Return the output of a norm that returns no sum."""
    assert isinstance(y, Tensor)
    return y


def _by_tiles(x: Tensor | Scaled, weight: Weight, bias: Tensor | None, dual: bool = False, **options: Any) -> Tensor:
    """Run the kernel for sm_90; return (N, L, C_out)."""
    tiles = on_hopper.tiles_of(x.shape[0] * x.shape[1], weight, dual=dual)
    y = torch.empty(*x.shape[:2], weight.shape[0] // (1 + dual), dtype=x.dtype, device=x.device)
    on_hopper.launch_tiles(tiles, y, factors(x, weight), bias, **options)
    return y


def product_facts(x: Tensor | Scaled, weight: Weight, *, dual: bool = False) -> dict[str, Any]:
    """Return the facts of a product that the table of choices matches on. dual: two products."""
    (n, tokens, channels), rows = x.shape, weight.shape[0]
    return {
        "channels": channels, "rows": rows, "tokens": n * tokens, "picture": tokens, "dtype": x.dtype,
        "bits": 8 * x.dtype.itemsize, "format": format_of(weight),
        "fills_card": on_hopper.fills_card(n * tokens, weight, dual=dual),
    }  # fmt: skip


def product_plan_of(operation: str, x: Tensor | Scaled, weight: Weight, *, residual: bool = False) -> str | None:
    """Name the plan of a product, or return None if x is not 16-bit."""
    rows, channels = weight.shape
    if x.dtype.itemsize != 2:
        return None
    return product_plan(operation, channels, rows, residual=residual, format=format_of(weight))


def _multiplied(x: Tensor | Scaled, weight: Weight) -> tuple[Tensor, Tensor]:
    """Return x and the weight as torch multiplies them."""
    (tokens,) = as_multiplied(x, weight)
    return tokens, plain(weight, tokens.dtype)


def products_obstacle(x: Tensor | Scaled, weight: Weight) -> str | None:
    """Say why the kernel of `linear`, `swiglu` and `geglu` does not take these inputs, or return None."""
    if x.dtype not in DTYPES or 0 in x.shape:
        return f"no kernel for {x.dtype} of {tuple(x.shape)}"
    return fp8_obstacle(x.device) if weight.dtype == FP8 else None


@dataclass(frozen=True, eq=False)
class GatedCall(Call[Tensor]):
    """Two linear layers over the same tokens as one product, multiplied: the common part of `swiglu` and `geglu`."""

    x: Tensor | Scaled
    weight: Weight
    bias: Tensor | None = None

    activation: ClassVar[str | None] = None  # of the first product
    activation2: ClassVar[str | None] = None  # of the second

    @property
    def device(self) -> torch.device:
        return self.x.device

    def check(self) -> None:
        LinearCall(self.x, self.weight, self.bias)  # both layers as one
        if self.weight.shape[0] % 2:
            raise ValueError(f"weight: expected (2 C_out, C_in), got {tuple(self.weight.shape)}")

    def reference(self) -> Tensor:
        return cpu.gated(*_multiplied(self.x, self.weight), self.bias, self.activation, self.activation2)

    def obstacle(self) -> str | None:
        return products_obstacle(self.x, self.weight)

    def facts(self) -> dict[str, Any]:
        return product_facts(self.x, self.weight, dual=True) | {"residual": False, "gate": False, "norm": False}

    def hopper_plan(self) -> str | None:
        return product_plan_of(self.name, self.x, self.weight)

    def hopper_obstacle(self) -> str | None:
        return on_hopper.obstacle(self.x, self.weight, self.weight.shape[0] // 2)

    def hopper(self) -> Tensor:
        activations = {"activation": self.activation, "activation2": self.activation2}
        return _by_tiles(self.x, self.weight, self.bias, dual=True, **activations)

    def kernel(self) -> Tensor:
        weights = self.weight.unflatten(0, (2, -1))
        return launch_products(self.x, weights, self.bias, activation=self.activation, activation2=self.activation2)


class TokenTile(NamedTuple):
    """The output tile that one program computes at a time, and its launch options."""

    tokens: int
    channels: int
    block: int  # input channels per step
    out: int  # output channels that the epilogue handles at a time
    warps: int
    stages: int
    resident: int = 1  # programs resident on a multiprocessor


TileList = tuple[tuple[float, TokenTile], ...]

# 16-bit, with descriptors: the best on one H200 (docs/measurements), each from that many tiles per multiprocessor.
TILES: TileList = (
    (2, TokenTile(128, 128, 64, 64, warps=4, stages=3, resident=2)),
    (0.5, TokenTile(64, 128, 128, 128, warps=4, stages=4)),
    (0, TokenTile(64, 64, 128, 64, warps=4, stages=3, resident=2)),
)
# With a residual, or RMSNorm before: both need registers. RMSNorm sums step by step, so all tiles have equal steps.
ADDED_TILES: TileList = ((2, TokenTile(128, 256, 64, 128, warps=8, stages=3)), *TILES[1:])
NORMED_TILES: TileList = tuple((fewest, tile._replace(block=64)) for fewest, tile in ADDED_TILES)
DUAL_TILES: TileList = ((0, TokenTile(128, 128, 64, 128, warps=8, stages=3)),)
# With pointers, chosen the same way.
POINTER_TILES: TileList = (
    (1, TokenTile(128, 64, 32, 64, warps=4, stages=3, resident=2)),
    (0, TokenTile(64, 64, 32, 64, warps=4, stages=3, resident=2)),
)
FLOAT32_DUAL_TILES: TileList = ((0, TokenTile(32, 32, 32, 32, warps=4, stages=2, resident=2)),)
FLOAT32_TILES: TileList = ((1, TokenTile(64, 64, 32, 64, warps=4, stages=2, resident=2)), *FLOAT32_DUAL_TILES)
# fp8; chosen, not measured. Each step is added to the float32 sum separately, so steps are equally long in all tiles.
FP8_TILES: TileList = (
    (2, TokenTile(128, 128, 128, 64, warps=8, stages=5)),
    (0.5, TokenTile(64, 128, 128, 64, warps=4, stages=4, resident=2)),
    (0, TokenTile(64, 64, 128, 64, warps=4, stages=5, resident=2)),
)
FP8_DUAL_TILES: TileList = ((0, TokenTile(128, 128, 128, 128, warps=8, stages=3)),)
FP8_POINTER_TILES: TileList = ((0, TokenTile(64, 64, 128, 64, warps=4, stages=3)),)
FLOAT32_CHUNK = 128  # input channels: the error of one long float32 sum would be three times torch's
MEMORY = 192 * 1024  # most bytes of a program's prefetched tiles, on the largest GPU
GROUP_M = 8  # rows of tiles that share weights in the L2; chosen, not measured


def launch_products(
    x: Tensor | Scaled,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    activation2: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    rms_eps: float | None = None,
) -> Tensor:
    """Launch the kernel: `linear` for a weight (1, C_out, C_in), `swiglu` and `geglu` for one of (2, C_out, C_in).

    activation2: applied to the second product, if any. rms_eps: if given, x is divided by its root mean square.
    """
    from fastdiff.kernels.device.linear import linear_kernel  # imports Triton

    n, tokens, channels = x.shape
    parts, out_channels, _ = weight.shape
    y = torch.empty(n, tokens, out_channels, dtype=x.dtype, device=x.device)
    x, values, x_scale, scale = factors(x, weight)
    shape = (n, tokens) if gate is not None else (1, n * tokens)  # only a gate distinguishes pictures
    x = side_by_side(x.reshape(*shape, channels))
    bias, gate = side_by_side(bias), side_by_side(gate)
    residual = None if residual is None else residual.reshape(*shape, out_channels).contiguous()
    out = y.view(*shape, out_channels)
    loaded = [tensor for tensor in (out, x, values, residual) if tensor is not None]
    by_descriptors = has_descriptors(x.device) and all(map(suits_descriptors, loaded))
    extras = dict(dual=parts == 2, normed=rms_eps is not None, added=residual is not None)
    tiles = _tiles_for(x.itemsize, by_descriptors, **extras)
    usual, loads = _first_busy(tiles, out), "descriptors" if by_descriptors else "pointers"
    step, stored = (usual.tokens + parts * usual.channels) * usual.block, usual.tokens * usual.channels
    stages = stages_for_two(usual.stages, step * x.itemsize, stored * out.itemsize, x.device)
    usual = usual._replace(stages=stages)
    sizes = *shape, channels, parts, out_channels
    tile = tuned(
        "linear", x.device,
        lambda: named(*sizes, x.dtype, loads, activation, activation2, scale=scale, bias=bias, gate=gate,
                      residual=residual, rms=rms_eps),
        usual, lambda: _alternatives(usual, x.itemsize, by_descriptors, parts, normed=rms_eps is not None),
    )  # fmt: skip
    programs = min(_programs(tile, out), tile.resident * multiprocessors(x.device))
    because(lambda: f"by {loads}, {tile.tokens} tokens x {tile.channels} channels a tile")

    def operand(tensor: Tensor | None, rows: int, columns: int) -> Any:
        return descriptor(tensor, [1, rows, columns]) if by_descriptors and tensor is not None else tensor

    launch(
        linear_kernel, (programs,),
        operand(out, tile.tokens, tile.out), operand(x, tile.tokens, tile.block),
        operand(values, tile.channels, tile.block), x_scale, scale, bias, gate,
        operand(residual, tile.tokens, tile.out),
        *shape, channels, out_channels, *x.stride()[:2], 0 if gate is None else gate.stride(0), rms_eps or 0.0,
        ACTIVATION=activation or "none", ACTIVATION2=activation2 or "none", DUAL=parts == 2, NORMED=rms_eps is not None,
        CHUNK=FLOAT32_CHUNK if x.dtype == torch.float32 else 0,
        BM=tile.tokens, BN=tile.channels, BK=tile.block, BY=tile.out, GROUP_M=GROUP_M,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def _tiles_for(itemsize: int, by_descriptors: bool, dual: bool, normed: bool, added: bool) -> TileList:
    if itemsize == 1:
        return FP8_POINTER_TILES if not by_descriptors else FP8_DUAL_TILES if dual else FP8_TILES
    if not by_descriptors:
        return POINTER_TILES if itemsize == 2 else FLOAT32_DUAL_TILES if dual else FLOAT32_TILES
    return DUAL_TILES if dual else NORMED_TILES if normed else ADDED_TILES if added else TILES


def _programs(tile: TokenTile, out: Tensor) -> int:
    """Return the number of output tiles."""
    pictures, tokens, channels = out.shape
    return pictures * -(-tokens // tile.tokens) * -(-channels // tile.channels)


def _first_busy(tiles: TileList, out: Tensor) -> TokenTile:
    return next(tile for fewest, tile in tiles if _programs(tile, out) >= fewest * multiprocessors(out.device))


def _alternatives(
    usual: TokenTile, itemsize: int, by_descriptors: bool, parts: int, *, normed: bool
) -> list[TokenTile]:
    """Return tuning candidates that keep the order of every sum. float32, fp8 and RMSNorm keep the usual block.

    A single product in float32, or in 16 bits with pointers, sums in another order if a tile is over 64 both ways or
    over 128 channels wide: on an H200 such a tile gave other bits than the usual one.
    """
    narrow = parts == 1 and (itemsize == 4 or (itemsize == 2 and not by_descriptors))
    sides = (32, 64, 128) if itemsize == 4 else (64, 128, 256)
    blocks = {usual.block} if itemsize != 2 or normed else {64, 128} if by_descriptors else {32, 64}
    found = []
    for tokens, channels, block, stages in product(sides, sides, sorted(blocks), (2, 3, 4)):
        loaded = stages * (tokens + parts * channels) * block * itemsize
        if tokens * channels * parts > (128 * 128 if itemsize == 1 else 128 * 256) or loaded > MEMORY:
            continue
        if narrow and (min(tokens, channels) > 64 or channels > 128):
            continue
        warps = 4 if tokens * channels * parts <= 128 * 128 else 8
        out = channels if parts == 2 else min(channels, 64 if tokens > 64 else 128)
        resident = min(2, MEMORY // loaded) if warps == 4 else 1
        found.append(TokenTile(tokens, channels, block, out, warps, stages, resident))
    return found
