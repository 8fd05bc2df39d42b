"""The sm_90 convolution without a card: its plans, its tiles, and its kernel emulated on the CPU."""

import os
from itertools import product
from math import prod

import pytest
import torch

from fastdiff.kernels.conv2d import Conv2dCall, Norm, Shortcut, conv2d
from fastdiff.kernels.group_norm import GroupNormCall
from fastdiff.kernels.host import launching
from fastdiff.kernels.host.recording import record
from fastdiff.kernels.host.weights import FP8, INT8, Quantised, quantise
from fastdiff.kernels.plans import choices
from fastdiff.kernels.plans import hopper_conv2d as hopper
from fastdiff.kernels.plans.choices import convolution_plan
from fastdiff.kernels.plans.conv2d_problem import Problem
from tests.kernels.plans.emulated_gluon import emulated
from tests.kernels.test_conv2d import by_torch
from tests.kernels.test_to_fp8 import dequantised
from tests.support.accuracy import in_dtype
from tests.support.pairwise import product as product_of

pytest.importorskip("triton", reason="no Triton here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the emulation does not use the interpreter", allow_module_level=True)


def problem(pictures, height, width, channels, out_channels, mode="same", **sizes) -> Problem:
    stride, upsample = {"same": (1, False), "down": (2, False), "up": (1, True)}[mode]
    given = dict(kernel=(3, 3), padding=(1, 1, 1, 1), itemsize=2, fp8=False) | sizes
    return Problem(
        pictures, height, width, channels, out_channels, given["kernel"], stride, given["padding"], upsample,
        given["itemsize"], fp8=given["fp8"],
    )  # fmt: skip


def plan_name(made: Problem, *, shortcut: bool) -> str | None:
    if not hopper.has(made, shortcut=shortcut, int8=False):
        return None
    format = "fp8" if made.fp8 else None
    return convolution_plan(made.mode, made.pixels, sum(made.channels), shortcut=shortcut, format=format)


@pytest.mark.parametrize(
    ("sizes", "options", "name"),
    [
        ((64, 64, (320,), 320), {}, "conv2d-same-4096-512"),
        ((52, 76, (320,), 640), {}, "conv2d-same-1024-512"),
        ((16, 16, (512,), 512), {}, "conv2d-same-256-512"),
        ((128, 128, (640,), 320), {}, "conv2d-same-16384-more"),
        ((128, 128, (64,), 64), {"mode": "up"}, "conv2d-up-65536-128"),
        ((16, 16, (1280,), 1280), {}, "conv2d-same-256-more"),
        ((8, 8, (512,), 512), {}, None),
        ((32, 32, (128, 64), 128), {}, "conv2d-same-1024-256"),
        ((32, 32, (64,), 64), {"mode": "up"}, "conv2d-up-4096-128"),
        ((32, 32, (64,), 72), {"mode": "up"}, None),  # a tile would reach into the next pixel
        ((64, 64, (64,), 64), {"mode": "down"}, None),
        ((64, 64, (64,), 64), {"kernel": (1, 1), "padding": (0, 0, 0, 0)}, None),
        ((64, 64, (64,), 64), {"padding": (0, 0, 0, 0)}, None),
        ((64, 64, (64,), 64), {"itemsize": 4}, None),
        ((64, 64, (3,), 64), {}, None),
        ((64, 64, (64,), 4), {}, None),
        ((64, 64, (36,), 64), {}, None),
        ((64, 64, (320,), 328), {"fp8": True}, "conv2d-same-4096-512, fp8"),
        ((32, 32, (128, 72), 128), {"fp8": True}, None),  # 72 bytes
        ((32, 32, (64,), 64), {"mode": "up", "fp8": True}, "conv2d-up-4096-128, fp8"),
    ],
)
def test_the_plan_is_named_by_the_picture_alone(sizes, options, name):
    for pictures in (1, 64):
        assert plan_name(problem(pictures, *sizes, **options), shortcut=False) == name
        with_shortcut = None
        if name is not None and "mode" not in options:
            with_shortcut = f"{name.removesuffix(', fp8')}-shortcut" + ", fp8" * options.get("fp8", False)
        assert plan_name(problem(pictures, *sizes, **options), shortcut=True) == with_shortcut


@pytest.mark.parametrize(("mode", "fp8"), [("same", False), ("up", False), ("same", True), ("up", True)])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (32, 48), (52, 76), (64, 64), (104, 152), (256, 256)])
def test_tiles_share_out_the_pictures_and_whole_tiles_of_moments(mode, fp8, height, width):
    for pictures, out_channels, processors in product((1, 2, 8, 64), (64, 320, 1280), (78, 132)):
        made = problem(pictures, height, width, (64,), out_channels, mode, fp8=fp8)
        tiles, pixels = hopper.cut(made, processors), hopper.moments_pixels(made)
        rows, columns = hopper.grid_of(made)
        wanted = pictures * -(-columns // 16) * -(-out_channels // 64) * (2 if mode == "up" else 1)
        assert tiles.number - tiles.whole == 2 * (wanted * -(-rows // tiles.rows) - tiles.whole)
        if pixels is not None:
            assert rows * columns % pixels == 0 and made.pixels % pixels == 0
            assert tiles.rows * 16 // (2 if tiles.halves else 1) // (2 if fp8 else 1) % pixels == 0


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(prod(shape))).half()


EMULATED = {  # N, H, W, input channels, output channels, options
    "N2-H24-W48-temb-residual": (2, 24, 48, (96,), 136, {"temb": True, "residual": True, "output_scale": 2**0.5}),
    "N1-H72-W64-moments-of-128": (1, 72, 64, (32,), 32, {}),
    "N3-H20-W40-odd": (3, 20, 40, (200,), 72, {"residual": True}),
    "N2-H16-W16-pair": (2, 16, 16, (64, 40), 64, {}),
    "N2-H32-W16-shortcut": (2, 32, 16, (64,), 72, {"shortcut": (200,), "temb": True}),
    "N2-H16-W32-shortcut-of-a-pair": (2, 16, 32, (64,), 64, {"shortcut": (64, 136), "output_scale": 2**0.5}),
    "N2-H16-W16-up": (2, 16, 16, (64,), 64, {"upsample": True}),
    "N1-H12-W20-up-odd": (1, 12, 20, (72,), 128, {"upsample": True, "residual": True, "temb": True}),
    "N2-H24-W48-fp8": (2, 24, 48, (96,), 136, {"weights": FP8, "temb": True, "residual": True, "output_scale": 2**0.5}),
    "N1-H72-W64-fp8-moments-of-128": (1, 72, 64, (32,), 32, {"weights": FP8}),
    "N3-H20-W40-fp8-odd": (3, 20, 40, (208,), 72, {"weights": FP8, "residual": True}),
    "N2-H16-W16-fp8-up": (2, 16, 16, (64,), 64, {"weights": FP8, "upsample": True}),
    "N1-H12-W20-fp8-up-odd": (
        1,
        12,
        20,
        (144,),
        128,
        {"weights": FP8, "upsample": True, "residual": True, "temb": True},
    ),
    "N1-H40-W20-fp8-up-of-a-pair": (1, 40, 20, (144, 32), 64, {"weights": FP8, "upsample": True}),
    "N2-H16-W16-fp8-pair": (2, 16, 16, (144, 48), 64, {"weights": FP8}),
    "N2-H32-W16-fp8-shortcut": (2, 32, 16, (320,), 72, {"weights": FP8, "shortcut": (200,), "temb": True}),
    "N2-H16-W32-fp8-shortcut-of-a-pair": (2, 16, 32, (64,), 64, {"weights": FP8, "shortcut": (64, 136)}),
    "N2-H24-W48-int8": (2, 24, 48, (96,), 136, {"weights": INT8, "temb": True, "residual": True, "output_scale": 2.0}),
    "N1-H12-W20-int8-up-odd": (1, 12, 20, (72,), 128, {"weights": INT8, "upsample": True}),
}


def call_of(n, height, width, channels, out_channels, options) -> tuple[tuple, dict]:
    """Return the arguments of conv2d.

    The options "temb", "residual" and "shortcut" become tensors of the right size; "weights" is the weight's format.
    """
    options = {"padding": 1} | options
    parts = tuple(numbers(n, height, width, c) for c in channels)
    weight = (numbers(out_channels, sum(channels), 3, 3) * (9 * sum(channels)) ** -0.5).half()
    if "weights" in options:
        weight = quantise(weight, options.pop("weights"))
    args = (parts if len(parts) > 1 else parts[0], weight, numbers(out_channels))
    plain = {key: value for key, value in options.items() if key not in ("temb", "residual", "shortcut")}
    if "temb" in options:
        options["temb"] = numbers(n, 3 * out_channels)[:, out_channels : 2 * out_channels]
    if "residual" in options:
        options["residual"] = numbers(*Conv2dCall(*args, **plain).problem.out_shape)
    if "shortcut" in options:
        added = tuple(numbers(n, height, width, c) for c in options["shortcut"])
        weight2 = (numbers(out_channels, sum(options["shortcut"]), 1, 1) / 16).half()
        options["shortcut"] = Shortcut(added if len(added) > 1 else added[0], weight2, numbers(out_channels))
    return args, options


def truth_of(args, options) -> torch.Tensor:
    """Return torch's result in float64, with dequantised 8-bit values."""
    x, weight, bias = args
    x = dequantised(x) if weight.dtype == FP8 else x
    weight = weight.dequantised(torch.float32) if isinstance(weight, Quantised) else weight
    return in_dtype(torch.float64, by_torch, x, weight, bias, **options)


@pytest.fixture
def emulator(monkeypatch):
    """Run the kernel on the CPU, with few multiprocessors, so that all kinds of tiles occur."""
    monkeypatch.setattr(hopper, "launch", emulated("hopper_conv", "conv2d_loads", "conv2d"))
    monkeypatch.setattr(choices, "card_of", lambda device: choices.SM_90)
    return lambda number: monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", number)


@pytest.mark.parametrize(("case", "multiprocessors"), product_of(EMULATED, [2, 5], together=1))
def test_emulated(case, multiprocessors, emulator):
    emulator(multiprocessors)
    args, options = call_of(*case)
    truth = truth_of(args, options)
    y, moments = conv2d.hopper(*args, moments=True, **options)
    assert ((y - truth).abs() <= torch.finfo(torch.float16).eps * truth.abs().clamp(min=0.5)).all()
    made = Conv2dCall(*args, **options).problem
    assert (moments is None) == (hopper.moments_pixels(made) is None)
    if moments is not None:
        mean, pixels = moments.mean.double().mean(1), truth.flatten(1, 2)
        m2 = (moments.m2 + moments.pixels * (moments.mean - mean[:, None]).square()).sum(1)
        torch.testing.assert_close(mean, pixels.mean(1), rtol=0, atol=1e-5)
        torch.testing.assert_close(m2, (pixels - mean[:, None]).square().sum(1), rtol=1e-5, atol=0)


def test_a_launch_has_only_what_is_there(monkeypatch):
    """A further argument takes registers in every loop, and a picture's descriptors add 0.5 KB to every launch."""
    found = {}
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", 2)  # no halves
    monkeypatch.setattr(hopper, "launch", lambda kernel, grid, *args, **named: found.update(outputs=args, **named))
    conv2d.hopper(*(call := call_of(1, 16, 16, (64,), 64, {}))[0], **call[1])
    absent = {name for name, value in found.items() if value is None}
    pictures = {f"{name}{part}" for name in ("x2", "shortcut", "shortcut2") for part in ("", "_half", "_channels")}
    assert absent == pictures | {"x_half", "x2_edge", "shortcut_w", "shortcut_bias", "temb", "scale", "mean", "m2"} | {
        "w_scale",
        "x_scale",
    }
    assert [each is None for each in found["outputs"]] == [False, True, True, True]


def test_a_norm_follows_and_a_report_says_what_runs_in_gluon(emulator, monkeypatch):
    emulator(2)
    args, options = call_of(1, 16, 16, (64,), 64, {})
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    monkeypatch.setattr(choices, "card_of", lambda device: choices.SM_90)
    monkeypatch.setattr(choices, "hopper_obstacle", lambda call: None)
    monkeypatch.setattr(GroupNormCall, "obstacle", lambda call: "its reference runs anywhere")
    with record(torch.device("cpu")) as recorded:
        y = conv2d(*args, **options, norm=Norm(8))
    truth = truth_of(args, options | {"norm": Norm(8)})
    torch.testing.assert_close(y.double(), truth, rtol=1e-3, atol=2e-3)
    assert recorded.calls[0].why == "Gluon, 128 pixels x 64 channels a tile, 2 tiles"
