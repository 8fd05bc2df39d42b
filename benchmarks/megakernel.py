"""The lower levels of a U-Net at batch 1 in one persistent launch with a barrier across the grid: does it win?

    python benchmarks/megakernel.py [WORKLOAD ...] [--save [DIR]]

The chains are ddpm-cifar10-32's between its attentions, in bfloat16: `16x16` one residual block, `down` from 16x16 to
the attention at 4x4, `up` from there to 16x16, whose blocks read a skip connection and add a 1x1 shortcut. In us, by
graph replays: `fastdiff` is the product's chain today, a launch a layer or two, `megakernel` one launch (`8_warps` the
same with twice the threads), `stages` its code with a launch for each stage, `barriers` its launch with nothing to do
between the barriers, `eager` and `compile` torch's. kernels/README.md says what came of it.

On paper, a residual block of 256 channels at 8x8 or 4x4, on an H200:

- Today three launches, a norm of 3.5 us and two convolutions whose k of 2304 is summed by 4 programs: 7.2 us each by
  the product's own plan, 11.9 where a pair is read, less what dependent launches overlap. About 16 us, a pair's 20.
- Its weights are 2 x 1.18 MB, 0.55 us at 4.3 TB/s, and asked for while waiting. Activations are 8 to 128 KB. The
  products are 0.15 GFLOP, 0.2 us of the whole card. None of these counts: all is latency.
- The megakernel has two stages a convolution: partial sums of k by 96 to 128 programs (0.8 us: a line of the table, one
  wait for L2, 3 to 5 steps), and their ordered sum with the norm (1.0 us: as much again for 64 KB a program and two
  reductions). With a barrier of 1 to 1.2 us after each a convolution takes 3.8 to 4.2 us, a block about 8.
- So at best `down` falls from 85 to 100 us (17 launches) to 48 (24 stages), `up` from 115 to 165 (23) to 66 (33), of a
  forward of 640. It loses where a stage and its barrier take more than 3.5 us together. `stages` says how much of a
  gain is the finer cut of k, which needs no barrier.

The reader could sum the partial sums itself, one barrier a convolution: but each program would read all of 64 KB at 8x8
(1.5 us from L2, more than the barrier) and 256 KB at 16x16. Attention stays out: it cuts the chains.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import DEVICE, chosen, compiled, max_abs_err, measure, needs_gpu, report
from megakernel_table import Chain
from torch import Tensor, nn

from fastdiff.models.blocks.layers import Conv2d, Feature
from fastdiff.models.blocks.resampling import Downsample2D, Upsample2D
from fastdiff.models.blocks.resnet import BlockOptions, ResnetBlock2D

GROUPS, EPS = 32, 1e-6
# The side of the input, and the layers; a pair is a block that reads a skip connection beside its input.
WORKLOADS: dict[str, tuple[int, Sequence[str]]] = {
    "ddpm32_b1-16x16": (16, ["block"]),
    "ddpm32_b1-down": (16, ["down", "block", "block", "down", "block", "block", "block"]),
    "ddpm32_b1-up": (4, ["block", "pair", "pair", "pair", "up", "pair", "pair", "pair", "up"]),
}

Features = list[tuple[nn.Module, Feature | None]]  # layers, each with its skip connection


def main() -> None:
    names = chosen(WORKLOADS)
    needs_gpu()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # of the float32 that errors are measured from
    report("megakernel", (row(name) for name in names))


@torch.inference_mode()
def row(name: str, width: int = 256, groups: int = GROUPS, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    layers, x, temb = build(*WORKLOADS[name], width=width, groups=groups, dtype=dtype)
    chain, wide = (Chain(tensors(layers), x.x, temb, num_warps=warps) for warps in (4, 8))
    idle = copy.copy(chain)
    idle.table = torch.zeros_like(chain.table)
    ours, given = ("megakernel", "8_warps", "stages"), (layers, x.x, temb)
    calls = {
        "fastdiff": partial(product, layers, x, temb),
        **dict(zip(ours, (chain.run, wide.run, chain.run_stages), strict=True)),
        "eager": partial(torchs, *given),
        "compile": partial(compiled(torchs), *given),
    }
    truth = torchs(*widened(*given, torch.float32))[-1]
    errors = {who: max_abs_err(call()[-1], truth) for who, call in calls.items()}
    for who in ours:
        if not errors[who] <= 2 * errors["eager"] + torch.finfo(dtype).eps:
            raise ArithmeticError(f"{name}: {who} is off by {errors[who]:.3g}, eager torch by {errors['eager']:.3g}")
    times = measure(calls | {"barriers": idle.run}, seconds=0.03)
    return {
        "workload": name,
        **{f"{who}_us": 1e3 * milliseconds for who, milliseconds in times.items()},
        "gain": times["fastdiff"] / times["megakernel"],
        "stages": len(chain.rows),
        **{f"{who}_max_abs_err": error for who, error in errors.items()},
    }


def build(
    side: int, kinds: Sequence[str], *, width: int, groups: int, dtype: torch.dtype
) -> tuple[Features, Feature, Tensor]:
    """Random layers with their skip connections, an input, and a time embedding: the arguments of `product`."""
    torch.manual_seed(0)
    options = BlockOptions(width, EPS, "silu", False, groups, None, 0)
    makers = {
        "block": lambda: ResnetBlock2D(width, width, options),
        "pair": lambda: ResnetBlock2D(2 * width, width, options),
        "down": lambda: Downsample2D(width, 0),
        "up": lambda: Upsample2D(width),
    }
    sizes, layers = {"down": 0.5, "up": 2}, []
    maker = prepared(Conv2d(width, width, 3), dtype)  # inputs come from a convolution, with moments for the norm
    x = maker(Feature(torch.randn(1, side, side, width, device=DEVICE).to(dtype)))
    for i, kind in enumerate(kinds):
        layer = prepared(makers[kind](), dtype)
        layer.columns = slice(i * width, (i + 1) * width)
        skip = Feature(torch.randn(1, side, side, width, device=DEVICE).to(dtype))
        layers.append((layer, maker(skip) if kind == "pair" else None))
        side = int(side * sizes.get(kind, 1))
    return layers, x, torch.randn(1, len(kinds) * width, device=DEVICE).to(dtype)


def prepared(module: nn.Module, dtype: torch.dtype) -> Any:
    """The module where it is measured, its weights as the product's models hold them, no norm's weight 1."""
    for norm in module.modules():
        if isinstance(norm, nn.GroupNorm):
            nn.init.normal_(norm.weight, 1, 0.2)
            nn.init.normal_(norm.bias, 0, 0.2)
    return module.to(DEVICE, dtype, memory_format=torch.channels_last)


def product(layers: Features, x: Feature, temb: Tensor) -> list[Tensor]:
    """The output of each layer, as the product runs it."""
    outputs = []
    for layer, skip in layers:
        joined = x if skip is None else (x, skip)
        x = layer(joined, temb) if isinstance(layer, ResnetBlock2D) else layer(joined)
        outputs.append(x.x)
    return outputs


def tensors(layers: Features) -> list[tuple[nn.Module, Tensor | None]]:
    """The layers with their skip connections as tensors."""
    return [(layer, None if skip is None else skip.x) for layer, skip in layers]


def widened(layers: Features, x: Tensor, temb: Tensor, dtype: torch.dtype) -> tuple[Features, Tensor, Tensor]:
    """The arguments of `torchs` in a wider dtype: of the truth."""
    wide = [(copy.deepcopy(layer).to(dtype), skip and Feature(skip.x.to(dtype))) for layer, skip in layers]
    return wide, x.to(dtype), temb.to(dtype)


def torchs(layers: Features, x: Tensor, temb: Tensor) -> list[Tensor]:
    """The output of each layer, (1, H, W, C), in plain torch."""
    outputs = []
    x = x.permute(0, 3, 1, 2)  # a view: torch's channels-last format
    for layer, skip in layers:
        joined = x if skip is None else torch.cat([x, skip.x.permute(0, 3, 1, 2)], dim=1)
        x = _block(layer, joined, temb) if isinstance(layer, ResnetBlock2D) else _resampled(layer, joined)
        outputs.append(x.permute(0, 2, 3, 1))
    return outputs


def _block(block: ResnetBlock2D, x: Tensor, temb: Tensor) -> Tensor:
    h = _conv(block.conv1, F.silu(_norm(block.norm1, x))) + temb[:, block.columns, None, None]
    h = _conv(block.conv2, F.silu(_norm(block.norm2, h)))
    return h + (x if block.conv_shortcut is None else _conv(block.conv_shortcut, x))


def _resampled(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, Downsample2D):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), layer.conv.weight, layer.conv.bias, stride=2)
    return _conv(layer.conv, F.interpolate(x, scale_factor=2.0, mode="nearest"))


def _conv(conv: Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, conv.bias, padding=conv.padding)


def _norm(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    return F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)


if __name__ == "__main__":
    main()
