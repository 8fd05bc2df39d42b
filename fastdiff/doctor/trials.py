"""Inputs for each sm_90 plan, with shapes that follow from the plan's name.

Each trial is a batch of different pictures. The last picture alone uses other tiles than the batch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import Shortcut, conv2d
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.weights import NAMES, Weight, quantise
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import choices, hopper_linear
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.kernels.swiglu import swiglu

DTYPES = (torch.bfloat16, torch.float16)
PRODUCTS: dict[str, Operation] = {"linear": linear, "swiglu": swiglu, "geglu": geglu}
FORMATS = {name: dtype for dtype, name in NAMES.items()}
PIXELS = 2**16  # in all pictures of a convolution
MOST_CHANNELS = 640  # for convolution plans without an upper bound
PICTURES, TOKENS = 4, 77  # for products; TOKENS is doubled until a picture's tokens fill the card
QUERIES, HEADS = 1000, 8
KEYS = 128  # per step of attention; a multiple of it compiles to different kernels


@dataclass(frozen=True)
class Trial:
    """The arguments of one call that runs by the plan."""

    operation: Operation
    pictures: dict[str, Any]  # arguments with a row for each picture: tensors, or a Shortcut
    shared: dict[str, Any]  # the other arguments

    def call(self) -> Call:
        """Return the call with the whole batch."""
        return self.operation.parse(**self.pictures, **self.shared)


class Numbers:
    """Normal random numbers with a fixed seed; tensors without memory on the meta device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._random = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.empty(shape, device=self.device) if self._random is None else self._drawn(shape)
        return (scale * drawn).to(self.dtype)

    def _drawn(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._random, device=self.device)

    def weight(self, *shape: int, format: str | None) -> Weight:
        """Return a weight whose products are about 1, in the memory layout of convolutions.

        Args:
            format: int8, fp8 or None.
        """
        made = self.normal(*shape, scale=(torch.Size(shape).numel() / shape[0]) ** -0.5)
        made = made.contiguous(memory_format=torch.channels_last) if made.ndim == 4 else made
        return made if format is None else quantise(made, FORMATS[format])


def trials_of(plan: str, device: torch.device) -> Iterator[Trial]:
    """Yield the trials of a plan in both 16-bit dtypes. Raises ValueError if there is no plan of this name."""
    for dtype in DTYPES:
        numbers = Numbers(device, dtype)
        if plan.startswith("attention "):
            yield from _attention(plan, numbers)
        elif plan.startswith("conv2d-"):
            yield _convolution(plan, numbers)
        else:
            yield _product(plan, numbers)


def _attention(plan: str, numbers: Numbers) -> Iterator[Trial]:
    found = next((row.facts for row in choices.CHOICES.rows if row.plan == plan), None)
    if found is None:
        raise ValueError(f"{plan} is not a plan")
    first, last, mask = found["keys"].start, found["keys"].stop - 1, found["mask"]
    whole = -(-first // KEYS) * KEYS
    for keys in dict.fromkeys(min(last, most) for most in (first + 76, whole)):
        queries, channels = keys if mask == "causal" else QUERIES, HEADS * (found["width"].stop - 1)
        pictures = {name: numbers.normal(PICTURES, keys, channels) for name in "kv"}
        pictures["q"] = numbers.normal(PICTURES, queries, channels)
        if mask == "masked":
            pictures["bias"] = numbers.normal(PICTURES, keys)
        if found["lengths"]:
            pictures["lengths"] = torch.arange(keys, keys - PICTURES, -1, dtype=torch.int32, device=numbers.device)
        yield Trial(attention, pictures, {"heads": HEADS, "causal": mask == "causal"})


def _convolution(plan: str, numbers: Numbers) -> Trial:
    found = re.fullmatch(r"conv2d-(same|up)-(\d+)-(\d+|more)(-shortcut)?(?:, (fp8|int8))?", plan)
    if found is None:
        raise ValueError(f"{plan} is not a plan")
    mode, pixels, depth, shortcut, format = found.groups()
    side, channels = int(int(pixels) ** 0.5), MOST_CHANNELS if depth == "more" else int(depth)
    n, read = max(PICTURES, PIXELS // int(pixels)), side // 2 if mode == "up" else side
    pictures: dict[str, Any] = {"x": numbers.normal(n, read, read, channels), "temb": numbers.normal(n, channels)}
    shared: dict[str, Any] = {
        "weight": numbers.weight(channels, channels, 3, 3, format=format), "bias": numbers.normal(channels),
        "padding": 1, "upsample": mode == "up", "output_scale": 2**0.5,
    }  # fmt: skip
    if shortcut:
        weight = numbers.normal(channels, channels, 1, 1, scale=channels**-0.5)
        pictures["shortcut"] = Shortcut(numbers.normal(n, side, side, channels), weight, numbers.normal(channels))
    else:
        pictures["residual"] = numbers.normal(n, side, side, channels)
    return Trial(conv2d, pictures, shared)


def _product(plan: str, numbers: Numbers) -> Trial:
    found = re.fullmatch(r"(linear|swiglu|geglu) (\d+) to (\d+)(, residual)?(?:, (fp8|int8))?", plan)
    if found is None:
        raise ValueError(f"{plan} is not a plan")
    name, channels, rows, residual, format = found.groups()
    weight = numbers.weight(int(rows), int(channels), format=format)
    tokens = TOKENS
    while not hopper_linear.fills_card(tokens, weight, dual=name != "linear"):
        tokens *= 2
    pictures = {"x": numbers.normal(PICTURES, tokens, int(channels))}
    if residual:
        pictures["residual"] = numbers.normal(PICTURES, tokens, int(rows))
    return Trial(PRODUCTS[name], pictures, {"weight": weight, "bias": numbers.normal(int(rows))})
