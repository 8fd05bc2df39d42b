"""The table of stages that `megakernel_device.chain_kernel` runs, made of the product's own modules and weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megakernel_device import (
    CHANNELS,
    COMBINE,
    COMBINED,
    DEPTH,
    FIELDS,
    HELD,
    PIXELS,
    PRODUCTS,
    UNIT,
    WEIGHT,
    Combine,
    Products,
    chain_kernel,
)
from torch import Tensor, nn

from fastdiff.kernels.device.language import tl
from fastdiff.kernels.host.launching import launch, multiprocessors
from fastdiff.models.blocks.layers import Conv2d, GroupNorm
from fastdiff.models.blocks.resampling import Downsample2D
from fastdiff.models.blocks.resnet import ResnetBlock2D

PROGRAMS = 128  # at most; k is cut into slices for so many, whatever the card
STAGES = 4  # loads under way
ROWS = (64, 256)  # pixels of a picture, of the two variants of `Combine`
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

Layer = tuple[nn.Module, Tensor | None]  # with the skip connection that a residual block reads beside its input


@dataclass
class Pending:
    """An output that waits for its `Combine`: how large it is, and fields of that."""

    channels: int
    side: int
    fields: dict[str, Any]


class Chain:
    """Residual blocks and resamplers of one picture, in one launch.

    Args:
        layers: their modules; widths multiples of 64, groups of 1 to 16 channels, powers of two.
        x: (1, H, H, C), float32, float16 or bfloat16, at most 256 pixels, a power of two.
        temb: (1, width), of which each block reads its `columns`.

    `run` reads x, temb, skip connections and weights anew, and writes `outputs`, (1, H, W, C) of each layer.
    """

    def __init__(self, layers: Iterable[Layer], x: Tensor, temb: Tensor, *, num_warps: int = 4):
        self.dtype, self.device, self.num_warps = x.dtype, x.device, num_warps
        self.programs = min(PROGRAMS, multiprocessors(x.device))
        self.counter = torch.zeros(1, dtype=torch.int64, device=x.device)
        self.partial = self._empty(PROGRAMS * PIXELS.value * CHANNELS.value, dtype=torch.float32)
        self.memory = [self.partial]  # all that the kernel writes
        self.kept: list[Any] = [temb]  # what the table points to lives as long as the table
        self.eps = 0.0  # of all norms
        self.rows: list[list[int]] = []
        self.outputs: list[Tensor] = []
        pending = Pending(x.shape[3], x.shape[1], {"residual": x})
        for layer, skip in layers:
            add = self._add_block if isinstance(layer, ResnetBlock2D) else self._add_resampler
            pending = add(pending, layer, temb, skip)
        self.outputs = [*self.outputs[1:], self._combine(pending)[0]]
        self.table = torch.tensor([*self.rows, *[[0] * FIELDS.value] * 2]).to(x.device)

    def run(self) -> list[Tensor]:
        """All stages in one launch; in Triton's interpreter, where programs run one after another, in one each."""
        if self.device.type != "cuda":
            return self.run_stages()
        chain_kernel[(self.programs,)](
            *self._arguments(0, len(self.rows)), PERSISTENT=True, launch_cooperative_grid=True,
            num_warps=self.num_warps, num_stages=STAGES, enable_fp_fusion=False,
        )  # fmt: skip
        return self.outputs

    def run_stages(self) -> list[Tensor]:
        """The same code with a launch a stage, and dependent launches in the place of the barrier."""
        for stage in range(len(self.rows)):
            launch(
                chain_kernel, (self.programs,), *self._arguments(stage, stage + 1), PERSISTENT=False,
                num_warps=self.num_warps, num_stages=STAGES, fp_fusion=False,
            )  # fmt: skip
        return self.outputs

    def _arguments(self, first: int, last: int) -> tuple[Any, ...]:
        return self.table, self.counter, first, last, self.eps, TRITON_DTYPES[self.dtype]

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def _add_block(self, x: Pending, block: ResnetBlock2D, temb: Tensor, skip: Tensor | None) -> Pending:
        raw, normed = self._combine(x, skip=skip, norm=block.norm1)
        hidden = self._products(normed, block.conv1, x.side)
        hidden.fields["temb"] = temb[0, block.columns]
        _, normed = self._combine(hidden, norm=block.norm2, keeps=False)
        if block.conv_shortcut is not None:
            return self._products(normed, block.conv2, x.side, shortcut=(raw, block.conv_shortcut))
        result = self._products(normed, block.conv2, x.side)
        result.fields["residual"] = raw
        return result

    def _add_resampler(self, x: Pending, layer: Any, temb: Tensor, skip: None) -> Pending:
        raw, _ = self._combine(x)
        if isinstance(layer, Downsample2D):
            return self._products(raw, layer.conv, x.side // 2, stride=2, pad=1 if layer.padding == 1 else 0)
        return self._products(raw, layer.conv, x.side * 2, doubled=1)

    def _combine(
        self, x: Pending, *, skip: Tensor | None = None, norm: GroupNorm | None = None, keeps: bool = True
    ) -> tuple[Any, Any]:
        """x and the skip connection beside it, (1, H, W, C), and the same normalised, where they are asked for."""
        given = "partial" not in x.fields and skip is None
        raw = x.fields["residual"] if given else None
        skip_channels = 0 if skip is None else skip.shape[3]
        width = x.channels + skip_channels
        if keeps and not given:
            raw = self._activations(x.side, width)
        normed = None if norm is None else self._activations(x.side, width)
        if keeps:
            self.outputs.append(raw[..., : x.channels])
        if given and norm is None:
            return raw, None
        fields: dict[str, Any] = dict.fromkeys(Combine._fields, 0) | x.fields
        fields |= dict(pixels=x.side**2, channels=x.channels, skip=skip, skip_channels=skip_channels, normed=normed)
        fields["raw"] = None if given else raw
        if norm is not None:
            assert self.eps in (0.0, norm.eps)
            self.eps = norm.eps
            fields |= dict(group=width // norm.num_groups, norm_weight=norm.weight, norm_bias=norm.bias)
            assert COMBINED.value % fields["group"] == 0
        assert x.side**2 <= ROWS[-1] and x.channels % COMBINED.value == skip_channels % COMBINED.value == 0
        self._append(COMBINE, width // COMBINED.value, None, Combine(**fields))
        return raw, normed

    def _activations(self, side: int, channels: int) -> Tensor:
        self.memory.append(self._empty(1, side, side, channels))
        return self.memory[-1]

    def _products(
        self, x: Tensor, conv: Conv2d, side: int, *, stride: int = 1, doubled: int = 0, pad: int = 1,
        shortcut: tuple[Tensor, Conv2d] | None = None,
    ) -> Pending:  # fmt: skip
        weight = conv.weight.permute(0, 2, 3, 1)  # (C_out, 3, 3, C)
        out_channels, _, _, channels = weight.shape
        joined, joined_conv = shortcut or (None, None)
        joined_channels = 0 if joined is None else joined.shape[3]
        assert weight.is_contiguous() and side.bit_count() == 1
        assert channels % DEPTH.value == joined_channels % DEPTH.value == out_channels % CHANNELS.value == 0
        tiles = -(-(side**2) // PIXELS.value) * (out_channels // CHANNELS.value)
        steps = (9 * channels + joined_channels) // DEPTH.value
        most = HELD.value // next(rows for rows in ROWS if side**2 <= rows)
        each = -(-steps // max(1, min(most, PROGRAMS // tiles)))
        slices = -(-steps // each)
        assert slices * side**2 * out_channels <= self.partial.numel()
        joined_weight = None if joined_conv is None else joined_conv.weight
        products = Products(
            x, weight, joined, joined_weight, self.partial, x.shape[1], channels, joined_channels,
            side.bit_length() - 1, out_channels, slices, each, stride, doubled, pad,
        )  # fmt: skip
        self._append(PRODUCTS, tiles * slices, weight, products)
        fields = dict(partial=self.partial, slices=slices, bias=conv.bias)
        if joined_conv is not None:
            fields["shortcut_bias"] = joined_conv.bias
        return Pending(out_channels, side, fields)

    def _append(self, kind: Any, tasks: int, weight: Tensor | None, fields: Products | Combine) -> None:
        elements = 0 if weight is None else weight.numel() * weight.dtype.itemsize // 2
        self.kept += [weight, *fields]
        words = [_word(name, value) for name, value in fields._asdict().items()]
        words = [kind.value, tasks, *words]
        words += [0] * (WEIGHT.value - len(words)) + [_word("weight", weight), elements]
        self.rows.append(words + [0] * (FIELDS.value - len(words)))


def _word(name: str, value: Tensor | int | None) -> int:
    """The value as the table holds it: a tensor by its address, channels in units, nothing as 0."""
    if isinstance(value, Tensor):
        assert value.is_contiguous() and value.data_ptr() % 16 == 0
        return value.data_ptr()
    if value is not None and name.endswith("channels"):
        assert value % UNIT.value == 0
        return value // UNIT.value
    return value or 0
