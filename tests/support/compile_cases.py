"""The calls whose kernels are compiled for each GPU: case name -> a call of an operation with meta tensors."""

from functools import partial

import torch

from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import Norm, Shortcut, conv2d
from fastdiff.kernels.denoise import COLUMNS, EARLIER, StepOptions, denoise_step
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.moments import Moments
from fastdiff.kernels.host.weights import FP8, INT8, Quantised, k_first
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.kernels.merge_lora import LowRank, merge_lora
from fastdiff.kernels.rotary import rotary
from fastdiff.kernels.scale_input import scale_input
from fastdiff.kernels.swiglu import swiglu
from fastdiff.kernels.to_fp8 import to_fp8
from tests.support.compiled import TYPES


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def convolution(n, height, channels, out_channels, kernel=3, dtype=torch.bfloat16, **options):
    """Return a call of conv2d. `channels` is a pair for a skip connection."""
    channels = channels if isinstance(channels, tuple) else (channels,)
    parts = tuple(meta(n, height, height, c, dtype=dtype) for c in channels)
    weight = meta(out_channels, sum(channels), kernel, kernel, dtype=dtype)
    weight = weight.contiguous(memory_format=torch.channels_last)
    options = {"padding": kernel // 2, "moments": "norm" not in options, **options}
    return lambda: conv2d.kernel(
        parts if len(parts) > 1 else parts[0], weight, meta(out_channels, dtype=dtype), **options
    )


def row(n, length, channels, out_channels, dtype=torch.bfloat16, stride=1):
    """Return a call of conv2d as in a UNet1DModel: a 1 x 5 kernel over single rows, norm, Mish, temb and residual."""
    x, bias = meta(n, 1, length, channels, dtype=dtype), meta(out_channels, dtype=dtype)
    weight = meta(out_channels, channels, 1, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = k_first(weight) if dtype == torch.float32 else weight
    temb = meta(n, 3 * out_channels, dtype=dtype)[:, out_channels : 2 * out_channels]
    residual = meta(n, 1, length // stride, out_channels, dtype=dtype)
    norm = Norm(8, bias, bias, activation="mish", temb=temb, residual=residual)
    return lambda: conv2d.kernel(x, weight, bias, stride=stride, padding=(2, 2, 0, 0), norm=norm)


def merging(dtype=torch.bfloat16, factors=torch.float16):
    """Return a call of merge_lora."""
    change = LowRank(meta(640, 32, dtype=factors), meta(32, 1280, dtype=factors), 0.5)
    return lambda: merge_lora.kernel([meta(640, 1280, dtype=dtype)], [meta(640, 1280, dtype=dtype)], [[change]])


def norm(n, height, channels, pixels=None, dtype=torch.bfloat16, activation="silu", conditioned=False):
    """Return a call of group_norm. `channels` is a pair for a skip connection; `pixels`: the tile of given moments."""
    channels = channels if isinstance(channels, tuple) else (channels,)
    parts = tuple(meta(n, height, height, c, dtype=dtype) for c in channels)
    moments = None
    if pixels is not None:
        shapes = [(n, -(-(height**2) // pixels), c) for c in channels]
        moments = tuple(Moments(*(meta(*s, dtype=torch.float32) for _ in range(2)), pixels) for s in shapes)
    width = sum(channels)
    rows = (meta(n, 2 * width, dtype=dtype).chunk(2, dim=1)) if conditioned else (None, None)
    return lambda: group_norm.kernel(
        parts if len(parts) > 1 else parts[0], 4, meta(width, dtype=dtype), meta(width, dtype=dtype), eps=1e-5,
        activation=activation, scale=rows[0], shift=rows[1],
        moments=moments[0] if moments and len(parts) == 1 else moments,
    )  # fmt: skip


def attend(n, tokens, heads, width, keys=None, dtype=torch.bfloat16, causal=False, added=False, lengths=False):
    q, k, v = meta(n, tokens, 3 * heads * width, dtype=dtype).chunk(3, dim=-1)
    if keys is not None:
        k, v = meta(n, keys, 2 * heads * width, dtype=dtype).chunk(2, dim=-1)
    residual = meta(*q.shape, dtype=dtype) if added else None
    counts = meta(n, dtype=torch.int32) if lengths else None
    return lambda: attention.kernel(q, k, v, heads=heads, causal=causal, residual=residual, lengths=counts)


def attend_in_groups(tokens, heads, key_heads, width):
    q, k, v = meta(1, tokens, (heads + 2 * key_heads) * width).split(
        [each * width for each in (heads, key_heads, key_heads)], dim=-1
    )
    return lambda: attention.kernel(q, k, v, heads=heads, causal=True)


def project(n, tokens, channels, out_channels, dtype=torch.bfloat16, gated=False, activation=None, rms_norm=None):
    """Return a call of linear's kernel. `gated`: with a gate and a residual."""
    x, weight = meta(n, tokens, channels, dtype=dtype), meta(out_channels, channels, dtype=dtype)
    options = {"bias": meta(out_channels, dtype=dtype), "activation": activation, "rms_norm": rms_norm}
    if gated:
        options["gate"] = meta(n, 6 * out_channels, dtype=dtype)[:, :out_channels]
        options["residual"] = meta(n, tokens, out_channels, dtype=dtype)
    return lambda: linear.kernel(x, weight, **options)


def in_8_bits(*shape, dtype):
    """Return an 8-bit weight. The weight of a convolution is channels-last."""
    values = meta(*shape, dtype=dtype)
    values = values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values
    return Quantised(values, meta(shape[0], dtype=torch.float32))


def eight_bits(operation, x_shape, weight_shape, dtype=torch.bfloat16, weight=INT8, **options):
    """Return a call with an 8-bit weight."""
    x, bias = meta(*x_shape, dtype=dtype), meta(weight_shape[0], dtype=dtype)
    return lambda: operation.kernel(x, in_8_bits(*weight_shape, dtype=weight), bias, **options)


fp8 = partial(eight_bits, weight=FP8)


def two_products(operation, n, tokens, channels, out_channels, dtype=torch.bfloat16):
    x, weight = meta(n, tokens, channels, dtype=dtype), meta(2 * out_channels, channels, dtype=dtype)
    return lambda: operation.kernel(x, weight)


def token_norm(n, tokens, channels, dtype=torch.bfloat16, rms=False, added=False):
    """Return a call of layer_norm with scale and shift. `added`: it also adds a gated residual first."""
    x, table = meta(n, tokens, channels, dtype=dtype), meta(n, 3 * channels, dtype=dtype)
    gate, scale, shift = table.chunk(3, dim=1)
    branch = {"residual": x, "gate": gate} if added else {}
    return lambda: layer_norm.kernel(x, eps=1e-6, rms=rms, scale=scale, shift=shift, **branch)


def normed_twice(n, tokens, channels, dtype=torch.bfloat16):
    """Return a call of layer_norm as Z-Image makes it."""
    x, weight, table = (meta(*shape, dtype=dtype) for shape in ((n, tokens, channels), (channels,), (n, channels)))
    options = {"residual": x, "gate": table, "scale": table, "branch_norm": (weight, 1e-5)}
    return lambda: layer_norm.kernel(x, weight, eps=1e-5, rms=True, **options)


def turned(n, tokens, queries, keys, width, dtype=torch.bfloat16, **options):
    """Return a call of rotary with the norms of heads."""
    x, table = meta(n, tokens, (queries + keys) * width, dtype=dtype), meta(1, tokens, width // 2, dtype=torch.float32)
    norms = meta(width, dtype=dtype), meta(width, dtype=dtype)
    return lambda: rotary.kernel(x, table, table, norms, queries=queries, eps=1e-5, **options)


def step(n, height, dtype=torch.bfloat16, guided=False, variance="fixed", noise="none", multistep=False):
    x_t = meta(n, height, height, 3, dtype=torch.float32)
    output = meta(n, height, height, 3 if variance == "fixed" else 6, dtype=dtype)
    noises = {"none": None, "given": x_t, "philox": meta(n, dtype=torch.int64)}
    table, counter = meta(50, len(COLUMNS), dtype=torch.float32), meta(n, dtype=torch.int32)
    return lambda: denoise_step.kernel(
        output, x_t, table, StepOptions(variance=variance), noise=noises[noise],
        unguided=output if guided else None, guidance_scale=meta(n, dtype=torch.float32), step=counter,
        earlier=meta(n, EARLIER, height, height, 3, dtype=torch.float32) if multistep else None,
    )  # fmt: skip


def model_input(n, height, dtype=torch.bfloat16, copies=1):
    x_t, table = meta(n, height, height, 3, dtype=torch.float32), meta(50, len(COLUMNS), dtype=torch.float32)
    return lambda: scale_input.kernel(x_t, table, meta(n, dtype=torch.int32), dtype, copies)


CASES = {
    "conv2d-N8-C128-H256-residual": convolution(8, 256, 128, 128, residual=meta(8, 256, 256, 128)),
    "conv2d-N8-C256-H64-temb": convolution(8, 64, 256, 256, temb=meta(8, 256)),
    "conv2d-N8-C128-H256-shortcut": convolution(
        8, 256, 128, 128, shortcut=Shortcut((meta(8, 256, 256, 128),) * 2, meta(128, 256, 1, 1), meta(128))
    ),
    "conv2d-N1-C256-H16-shortcut": convolution(
        1, 16, 256, 256, shortcut=Shortcut(meta(1, 16, 16, 512), meta(256, 512, 1, 1), meta(256))
    ),
    "conv2d-N2-C320-H128-tuned": convolution(2, 128, 320, 320),
    "conv2d-N64-C64-H32-residual-tuned": convolution(64, 32, 64, 64, residual=meta(64, 32, 32, 64)),
    "conv2d-N1-C128-H32-small-batch": convolution(1, 32, 128, 128),
    "conv2d-N1-C64-H32-small-batch": convolution(1, 32, 64, 64),
    "conv2d-N1-C256-H64-small-batch": convolution(1, 64, 256, 256),
    "conv2d-N64-C64-H64-residual": convolution(64, 64, 64, 64, residual=meta(64, 64, 64, 64)),
    "conv2d-N1-C1024-H8-spread-chunks": convolution(1, 8, 1024, 512),
    "conv2d-N64-C1024-H8-all-chunks": convolution(64, 8, 1024, 512),
    "conv2d-N64-C256-H4-many-pictures-a-tile": convolution(64, 4, 256, 256),
    "conv2d-N1-C64-H96-few-programs-of-a-large-picture": convolution(1, 96, 64, 64),
    "conv2d-N1-C256-H8-norm": convolution(1, 8, 256, 256, norm=Norm(32, meta(256), meta(256), 1e-6, "silu")),
    "conv2d-N1-C256-H4-norm": convolution(1, 4, 256, 256, norm=Norm(32, meta(256), meta(256), 1e-6, "silu")),
    "conv2d-N64-C256-H4-norm": convolution(64, 4, 256, 256, norm=Norm(32, meta(256), meta(256), 1e-6, "silu")),
    **{
        f"conv2d-N{n}-L{length}-C{channels}-{TYPES[dtype]}": row(n, length, channels, out, dtype=dtype)
        for n in (1, 1024)
        for length, channels, out in [(32, 14, 32), (4, 256, 256), (128, 32, 32), (256, 64, 64)]
        for dtype in (torch.bfloat16, torch.float32)
    },
    "conv2d-N1-L32-C32-down": row(1, 32, 32, 32, stride=2),
    "conv2d-N8-C256-H64-down": convolution(8, 64, 256, 256, stride=2, padding=(0, 1, 0, 1)),
    "conv2d-N8-C256-H32-up": convolution(8, 32, 256, 256, upsample=True),
    "conv2d-N8-C512+256-H32-shortcut": convolution(8, 32, (512, 256), 256, kernel=1),
    "conv2d-N8-C3-H256-first": convolution(8, 256, 3, 128),
    "conv2d-N8-C128-H256-last": convolution(8, 256, 128, 3),
    "conv2d-N2-C36-H7-odd": convolution(2, 7, 36, 36),
    "conv2d-N2-C64-H64-fp16": convolution(2, 64, 64, 64, dtype=torch.float16),
    "conv2d-N2-C64-H64-fp32": convolution(2, 64, 64, 64, dtype=torch.float32),
    "group_norm-N8-C128-H256-own-moments": norm(8, 256, 128),
    "group_norm-N8-C128-H256-tiles-of-256": norm(8, 256, 128, pixels=256),
    "group_norm-N64-C256-H16-folded": norm(64, 16, 256, pixels=256),
    "group_norm-N64-C128-H32-many-pictures": norm(64, 32, 128, pixels=64),
    "group_norm-N8-C512+256-H32-conditioned": norm(8, 32, (512, 256), pixels=256, conditioned=True),
    "group_norm-N1-C13+31-H9-odd": norm(1, 9, (13, 31)),
    "group_norm-N1-C36-H7-gelu-fp16": norm(1, 7, 36, dtype=torch.float16, activation="gelu"),
    "group_norm-N2-C224-H64-mish-fp32": norm(2, 64, 224, dtype=torch.float32, activation="mish"),
    "attention-L256-h1-d512": attend(8, 256, 1, 512),
    "attention-L256-h1-d256": attend(64, 256, 1, 256),
    "attention-L256-h4-d32": attend(64, 256, 4, 32),
    "attention-L4096-keys77-h8-d40": attend(2, 4096, 8, 40, keys=77),
    "attention-L4096-h8-d40-causal": attend(2, 4096, 8, 40, causal=True),
    "attention-L1024-h8-d80-fp16": attend(2, 1024, 8, 80, dtype=torch.float16),
    "attention-L256-h8-d160": attend(2, 256, 8, 160),
    "attention-L100-h3-d8": attend(1, 100, 3, 8),
    "attention-L256-keys4-h8-d40-residual": attend(2, 256, 8, 40, keys=4, added=True),
    "attention-L256-keys16-h8-d80-residual-fp32": attend(2, 256, 8, 80, keys=16, dtype=torch.float32, added=True),
    "attention-L4192-h30-d128-lengths": attend(2, 4192, 30, 128, lengths=True),
    "attention-L128-h32+8-d128-causal": attend_in_groups(128, 32, 8, 128),
    "attention-L1000-h2-d64-fp32": attend(1, 1000, 2, 64, dtype=torch.float32),
    "attention-L256-h1-d256-fp32": attend(1, 256, 1, 256, dtype=torch.float32),
    "linear-N32-C1152-qkv": project(32, 256, 1152, 3456),
    "linear-N2-C1152-fc1": project(2, 256, 1152, 4608, activation="gelu_tanh"),
    "linear-N2-C4608-fc2": project(2, 256, 4608, 1152, gated=True),
    "linear-N32-C4608-fc2-fp16": project(32, 256, 4608, 1152, dtype=torch.float16, gated=True),
    "linear-N1-C256-few-tokens": project(1, 64, 256, 768, activation="silu"),
    "linear-N32-C1152-rms-norm": project(32, 256, 1152, 3456, rms_norm=(None, 1e-6)),
    "linear-N2-C36-rms-norm-odd": project(2, 21, 36, 20, rms_norm=(None, 1e-6)),
    "linear-N2-C1152-rms-norm": project(2, 256, 1152, 3456, rms_norm=(None, 1e-6)),
    "linear-N2-C37-odd": project(2, 77, 37, 41, gated=True, activation="gelu"),
    "linear-N64-C36-odd": project(64, 77, 36, 412),
    "linear-N1-C1-smallest": project(1, 1, 1, 1, gated=True),
    "linear-N1-C1-smallest-fp32": project(1, 7, 1, 1, dtype=torch.float32, rms_norm=(None, 1e-6)),
    "linear-N2-C1152-fp32": project(2, 256, 1152, 3456, dtype=torch.float32, gated=True),
    "linear-N2-C1152-rms-norm-fp32": project(2, 256, 1152, 3456, dtype=torch.float32, rms_norm=(None, 1e-6)),
    "swiglu-N32-C1152": two_products(swiglu, 32, 256, 1152, 3072),
    "swiglu-N2-C37-odd": two_products(swiglu, 2, 77, 37, 41),
    "swiglu-N1-C1-smallest": two_products(swiglu, 1, 1, 1, 1),
    "swiglu-N2-C256-fp32": two_products(swiglu, 2, 256, 256, 512, dtype=torch.float32),
    "geglu-N2-C1280": two_products(geglu, 2, 1024, 1280, 5120),
    "geglu-N2-C36-odd-fp32": two_products(geglu, 2, 77, 36, 41, dtype=torch.float32),
    "linear-N32-C1152-int8": eight_bits(linear, (32, 256, 1152), (3456, 1152)),
    "linear-N2-C4608-residual-int8": eight_bits(
        linear, (2, 256, 4608), (1152, 4608), residual=meta(2, 256, 1152), activation="gelu_tanh"
    ),
    "linear-N2-C1152-rms-norm-int8": eight_bits(linear, (2, 256, 1152), (3456, 1152), rms_norm=(None, 1e-6)),
    "linear-N2-C37-odd-int8": eight_bits(linear, (2, 77, 37), (41, 37)),
    "linear-N2-C1152-fp32-int8": eight_bits(linear, (2, 256, 1152), (3456, 1152), dtype=torch.float32),
    "geglu-N2-C1280-int8": eight_bits(geglu, (2, 1024, 1280), (10240, 1280)),
    "conv2d-N2-C320-H64-int8": eight_bits(conv2d, (2, 64, 64, 320), (320, 320, 3, 3), padding=1, moments=True),
    "conv2d-N2-C1280-H32-int8": eight_bits(conv2d, (2, 32, 32, 1280), (1280, 1280, 3, 3), padding=1, moments=True),
    "conv2d-N1-C1024-H8-spread-chunks-int8": eight_bits(conv2d, (1, 8, 8, 1024), (512, 1024, 3, 3), padding=1),
    "conv2d-N8-C256-H64-down-int8": eight_bits(
        conv2d, (8, 64, 64, 256), (256, 256, 3, 3), stride=2, padding=(0, 1, 0, 1)
    ),
    "conv2d-N8-C256-H32-up-int8": eight_bits(conv2d, (8, 32, 32, 256), (256, 256, 3, 3), padding=1, upsample=True),
    "conv2d-N1-C256-H16-shortcut-int8": eight_bits(
        conv2d,
        (1, 16, 16, 256),
        (256, 256, 3, 3),
        padding=1,
        shortcut=Shortcut(meta(1, 16, 16, 512), meta(256, 512, 1, 1), meta(256)),
    ),
    "conv2d-N2-C36-H7-odd-int8": eight_bits(conv2d, (2, 7, 7, 36), (36, 36, 3, 3), padding=1),
    "conv2d-N2-C64-H64-fp32-int8": eight_bits(conv2d, (2, 64, 64, 64), (64, 64, 3, 3), dtype=torch.float32, padding=1),
    "layer_norm-N32-C1152-gated-residual": token_norm(32, 256, 1152, added=True),
    "layer_norm-N1-C3840-normed-twice": normed_twice(1, 4160, 3840),
    "layer_norm-N2-C36-rms": token_norm(2, 77, 36, rms=True),
    "layer_norm-N1-C1-smallest": token_norm(1, 1, 1, added=True),
    "layer_norm-N1-C3000-fp32": token_norm(1, 16, 3000, dtype=torch.float32),
    "rotary-N1-L4160-h60-d128": turned(1, 4160, 30, 30, 128),
    "rotary-N1-L128-h40-d128-halves": turned(1, 128, 32, 8, 128, halves=True),
    "rotary-N1-L9-h16-d512-fp32": turned(1, 9, 8, 8, 512, torch.float32),
    "rotary-N2-L9-h5-d6-odd": turned(2, 9, 3, 2, 6),
    "scale-input-N8-H64-guided": model_input(8, 64, copies=2),
    "scale-input-N1-H7-fp32": model_input(1, 7, torch.float32),
    "merge_lora": merging(),
    "merge_lora-fp32": merging(torch.float32, torch.float32),
    "denoise-N8-H256": step(8, 256),
    "denoise-N64-H32-guided-philox": step(64, 32, guided=True, noise="philox"),
    "denoise-N2-H7-learned": step(2, 7, variance="learned", noise="given", dtype=torch.float32),
    "denoise-N2-H64-multistep-philox": step(2, 64, noise="philox", multistep=True),
    "denoise-N8-H64-learned-range-philox": step(8, 64, variance="learned_range", noise="philox"),
    "conv2d-N1-C512-H16-fp32": convolution(1, 16, 512, 512, dtype=torch.float32),
}


FP8_CASES = {
    "to_fp8-tokens": lambda: to_fp8.kernel(meta(2, 256, 1152)),
    "to_fp8-pictures": lambda: to_fp8.kernel((meta(2, 32, 32, 640), meta(2, 32, 32, 320))),
    "layer_norm-N2-C1152": lambda: layer_norm.kernel(
        meta(2, 256, 1152), eps=1e-6, residual=meta(2, 256, 1152), gate=meta(2, 1152), in_fp8=True
    ),
    "linear-N32-C1152": fp8(linear, (32, 256, 1152), (3456, 1152)),
    "linear-N2-C4608-residual": fp8(
        linear, (2, 256, 4608), (1152, 4608), residual=meta(2, 256, 1152), activation="gelu_tanh"
    ),
    "linear-N2-C320": fp8(linear, (2, 64, 320), (320, 320)),
    "linear-N2-C37-odd": fp8(linear, (2, 77, 37), (41, 37)),
    "linear-N2-C1152-fp32": fp8(linear, (2, 256, 1152), (3456, 1152), dtype=torch.float32),
    "geglu-N2-C1280": fp8(geglu, (2, 1024, 1280), (10240, 1280)),
    "conv2d-N2-C320-H64": fp8(conv2d, (2, 64, 64, 320), (320, 320, 3, 3), padding=1, moments=True),
    "conv2d-N2-C1280-H32": fp8(
        conv2d, (2, 32, 32, 1280), (1280, 1280, 3, 3), padding=1, residual=meta(2, 32, 32, 1280)
    ),
    "conv2d-N1-C1024-H8-spread-chunks": fp8(conv2d, (1, 8, 8, 1024), (512, 1024, 3, 3), padding=1),
    "conv2d-N8-C256-H64-down": fp8(conv2d, (8, 64, 64, 256), (256, 256, 3, 3), stride=2, padding=(0, 1, 0, 1)),
    "conv2d-N8-C256-H32-up": fp8(conv2d, (8, 32, 32, 256), (256, 256, 3, 3), padding=1, upsample=True),
    "conv2d-N64-C256-H8-norm": fp8(
        conv2d, (64, 8, 8, 256), (256, 256, 3, 3), padding=1, norm=Norm(32, meta(256), meta(256), activation="silu")
    ),
    "conv2d-N8-C256-H32-shortcut": fp8(
        conv2d, (8, 32, 32, 256), (256, 256, 3, 3), padding=1,
        shortcut=Shortcut(meta(8, 32, 32, 512), meta(256, 512, 1, 1), meta(256)),
    ),
    "conv2d-N2-C36-H7-odd": fp8(conv2d, (2, 7, 7, 36), (36, 36, 3, 3), padding=1),
    "conv2d-N64-L32-C64-row": fp8(conv2d, (64, 1, 32, 64), (32, 64, 1, 5), padding=(2, 2, 0, 0)),
    "conv2d-N2-C64-H64-fp32": fp8(conv2d, (2, 64, 64, 64), (64, 64, 3, 3), dtype=torch.float32, padding=1),
}  # fmt: skip
