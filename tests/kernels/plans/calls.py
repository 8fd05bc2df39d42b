"""Calls of operations over a broad grid of shapes, dtypes, precisions and batch sizes, on meta tensors."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import Norm, Shortcut, conv2d
from fastdiff.kernels.from_int8 import as_loaded
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.weights import FP8, INT8, Quantised, Weight
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.kernels.rotary import rotary
from fastdiff.kernels.swiglu import swiglu
from fastdiff.kernels.to_fp8 import to_fp8

Calls = Iterator[tuple[str, Callable[[], Any]]]
HALF, FULL = torch.bfloat16, torch.float32
FORMATS = {None: "", INT8: " int8", FP8: " fp8"}
# (dtype, format of the weight)
PRECISIONS = ((HALF, None), (torch.float16, None), (FULL, None), (HALF, INT8), (HALF, FP8), (FULL, INT8), (FULL, FP8))


def meta(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight_of(*shape: int, dtype: torch.dtype, format: torch.dtype | None) -> Weight:
    values = meta(*shape, dtype=format or dtype)
    values = values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values
    return values if format is None else Quantised(values, meta(shape[0], dtype=torch.float32))


def named(*parts: Any) -> str:
    return " ".join(str(part).removeprefix("torch.") for part in parts if part not in (None, ""))


def convolutions() -> Calls:
    """Yield 3x3 convolutions of each mode, at sizes from models and at other sizes."""
    sides, widths = (8, 16, 31, 32, 64, 128, 256, 512), ((4, 320), (24, 32), (32, 64), (64, 64), (128, 128), (128, 256),
        (256, 256), (320, 320), (640, 320), (640, 640), (1280, 1280), (36, 36), (320, 4))  # fmt: skip
    modes: dict[str, dict[str, Any]] = {"same": {}, "up": {"upsample": True}, "down": {"stride": 2}}
    for (dtype, format), side, (c, out), mode in product(PRECISIONS, sides, widths, modes):
        for n in (1, 2, 64) if side < 128 else (1,):
            x, weight = meta(n, side, side, c, dtype=dtype), weight_of(out, c, 3, 3, dtype=dtype, format=format)
            name = named("conv2d", mode, n, side, c, out, dtype, FORMATS[format])
            yield name, lambda x=x, weight=weight, mode=mode: conv2d(x, weight, padding=1, moments=True, **modes[mode])


def other_convolutions() -> Calls:
    """Yield convolutions with shortcuts, pairs, norms, other filters and paddings, rows of pixels and odd batches."""
    for (dtype, format), side, c in product(PRECISIONS, (4, 8, 16, 32, 64, 128, 256), (32, 128, 256, 512, 640)):
        n, weight = 2, weight_of(c, c, 3, 3, dtype=dtype, format=format)
        x = meta(n, side, side, c, dtype=dtype)
        pair = (x, meta(n, side, side, 2 * c, dtype=dtype))
        both = weight_of(c, 3 * c, 3, 3, dtype=dtype, format=format)
        shortcut = Shortcut(pair, meta(c, 3 * c, 1, 1, dtype=dtype), meta(c, dtype=dtype))
        norm = Norm(8, meta(c, dtype=dtype), meta(c, dtype=dtype), activation="silu")
        point, row = (weight_of(c, c, *size, dtype=dtype, format=format) for size in ((1, 1), (1, 5)))
        cases: dict[str, Callable[[], Any]] = {
            "shortcut": lambda x=x, w=weight, s=shortcut: conv2d(x, w, padding=1, shortcut=s),
            "pair": lambda x=pair, w=both, r=x: conv2d(x, w, padding=1, residual=r),
            "norm": lambda x=x, w=weight, norm=norm: conv2d(x, w, padding=1, norm=norm),
            "1x1": lambda x=x, w=point: conv2d(x, w),
            "unpadded": lambda x=x, w=weight: conv2d(x, w),
            "down-right": lambda x=x, w=weight: conv2d(x, w, stride=2, padding=(0, 1, 0, 1)),
            "row": lambda x=x[:, :1], w=row, norm=norm: conv2d(x, w, padding=(2, 2, 0, 0), norm=norm),
            "strided": lambda x=x[:, :, ::2], w=weight: conv2d(x, w, padding=1),
        }
        yield from ((named("conv2d", how, side, c, dtype, FORMATS[format]), call) for how, call in cases.items())
    for x, weight in ((meta(0, 8, 8, 64), meta(64, 64, 3, 3)), (meta(1, 8, 8, 8).double(), meta(8, 8, 3, 3).double())):
        yield named("conv2d", tuple(x.shape), x.dtype), lambda x=x, w=weight: conv2d(x, w, padding=1)


def attentions() -> Calls:
    """Yield attention with many widths of heads and numbers of keys; also causal, with a bias, and in other dtypes."""
    keys_of = (1, 64, 65, 77, 80, 81, 256, 257, 1000, 1023, 1024, 4096, 8192, 8193, 16384)
    widths = (8, 20, 24, 32, 36, 40, 48, 50, 64, 72, 80, 96, 128, 160, 256, 257, 512, 520)
    for dtype, width, keys, how in product((HALF, torch.float16, FULL), widths, keys_of, ("", "causal", "masked")):
        for n, queries in ((1, 4096), (2, 77)):
            q, (k, v) = meta(n, queries, 4 * width, dtype=dtype), meta(2, n, keys, 4 * width, dtype=dtype)
            bias = meta(n, keys, dtype=dtype) if how == "masked" else None
            options = {"heads": 4, "causal": how == "causal", "bias": bias}
            yield (
                named("attention", how, n, queries, keys, width, dtype),
                lambda t=(q, k, v), o=options: attention(*t, **o),
            )
    for q in (meta(0, 8, 64), meta(1, 0, 64), meta(1, 8, 64).double(), meta(1, 80, 3 * 64)[..., :64]):
        yield (
            named("attention", tuple(q.shape), q.stride(), q.dtype),
            lambda q=q: (
                attention(q, q, q, heads=1) if len(q) and q.shape[1] else attention(q, *meta(2, len(q), 8, 64), heads=1)
            ),
        )


def attentions_with_a_residual() -> Calls:
    """Yield attention of many widths of heads to few keys, added to another one's result."""
    for dtype, width, keys in product((HALF, FULL), (8, 40, 64, 80, 160, 256), (4, 16, 64, 77, 256, 1024, 4096)):
        q, (k, v) = meta(2, 256, 4 * width, dtype=dtype), meta(2, 2, keys, 4 * width, dtype=dtype)
        yield (
            named("attention residual", keys, width, dtype),
            lambda q=q, k=k, v=v: attention(q, k, v, heads=4, residual=q),
        )


def products() -> Calls:
    """Yield linear layers, alone and with everything that can be fused, from few tokens to many."""
    shapes = ((320, 320), (320, 960), (320, 2560), (512, 1536), (640, 640), (640, 1920), (640, 5120), (768, 24960),
        (1152, 1152), (1152, 3456), (1152, 4608), (1152, 6144), (1280, 320), (1280, 1280), (1280, 3840), (1280, 10240),
        (2048, 166400), (2560, 640), (4608, 1152), (5120, 1280), (96, 192), (36, 20))  # fmt: skip
    sizes = ((1, 1), (2, 77), (1, 256), (2, 256), (2, 1024), (1, 4096), (2, 4096), (64, 256), (64, 1024), (3, 1000))
    for (dtype, format), (c, out), (n, tokens) in product(PRECISIONS, shapes, sizes):
        x, weight = meta(n, tokens, c, dtype=dtype), weight_of(out, c, dtype=dtype, format=format)
        bias, rows = meta(out, dtype=dtype), meta(n, tokens, out, dtype=dtype)
        cases: dict[str, Callable[[], Any]] = {
            "linear": lambda x=x, w=weight, b=bias: linear(x, w, b),
            "linear residual": lambda x=x, w=weight, r=rows: linear(x, w, residual=r),
            "linear gelu": lambda x=x, w=weight, b=bias: linear(x, w, b, activation="gelu_tanh"),
            "geglu": lambda x=x, w=weight, b=bias: geglu(x, w, b),
        }
        if tokens in (77, 256, 1000):
            gate, scale = meta(n, out, dtype=dtype), meta(c, dtype=dtype)
            strided = meta(n, tokens, c + 4, dtype=dtype)[..., :c]
            cases |= {
                "linear gate": lambda x=x, w=weight, r=rows, g=gate: linear(x, w, residual=r, gate=g),
                "linear rms": lambda x=x, w=weight: linear(x, w, rms_norm=(None, 1e-6)),
                "linear rms weight": lambda x=x, w=weight, s=scale: linear(x, w, rms_norm=(s, 1e-6)),
                "linear strided": lambda x=strided, w=weight: linear(x, w),
                "swiglu": lambda x=x, w=weight, b=bias: swiglu(x, w, b),
            }
        where = named(n, tokens, c, out, dtype, FORMATS[format])
        yield from ((named(how, where), call) for how, call in cases.items())
        if format is not None and tokens == 256:
            yield named("as_loaded", where), lambda values=weight.values, dtype=dtype: as_loaded(values, dtype)
    yield "linear empty", lambda: linear(meta(0, 8, 64), meta(64, 64))
    yield "linear float64", lambda: linear(meta(1, 8, 64).double(), meta(64, 64).double())


def norms() -> Calls:
    """Yield norms and conversions, with and without a kernel."""
    for dtype, c in product((HALF, FULL, torch.float64), (36, 320, 2048, 16384, 16388)):
        tokens, pictures = meta(2, 8, c, dtype=dtype), meta(2, 8, 8, c, dtype=dtype)
        angles = meta(1, 8, c // 4, dtype=torch.float32)
        cases: dict[str, Callable[[], Any]] = {
            "layer_norm": lambda x=tokens: layer_norm(x, eps=1e-6),
            "layer_norm fp8": lambda x=tokens: layer_norm(x, eps=1e-6, in_fp8=True),
            "layer_norm empty": lambda x=tokens[:0]: layer_norm(x, eps=1e-6),
            "group_norm": lambda x=pictures: group_norm(x, 4, eps=1e-6),
            "rotary": lambda x=tokens, a=angles: rotary(x, a, a, queries=1, eps=1e-6),
            "to_fp8": lambda x=tokens: to_fp8(x),
            "to_fp8 empty": lambda x=tokens[:0]: to_fp8(x),
        }
        yield from ((named(how, c, dtype), call) for how, call in cases.items())


GROUPS: dict[str, Callable[[], Calls]] = {
    "conv2d": convolutions,
    "conv2d, other": other_convolutions,
    "attention": attentions,
    "attention, residual": attentions_with_a_residual,
    "products": products,
    "norms": norms,
}
