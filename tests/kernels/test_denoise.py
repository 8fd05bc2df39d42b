"""The denoise step against float64 arithmetic, and Philox against Random123 and Triton."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from fastdiff.kernels.denoise import (
    COLUMNS,
    StepOptions,
    _box_muller,
    denoise_step,
    dynamic_threshold,
    philox4x32,
    philox_normal,
)

SHAPES = {
    "N4-H64-W64-C3-emoji": (4, 64, 64, 3),
    "N1-H5-W7-C3-odd": (1, 5, 7, 3),
    "N1-H1-W1-C1-smallest": (1, 1, 1, 1),
    "N2-L31-C2-one-dimension": (2, 31, 2),
}
OPTIONS = {
    "free": StepOptions(),
    "clip": StepOptions(clip_range=0.5),
    "threshold": StepOptions(threshold_ratio=0.9, threshold_max=1.7),
    "learned": StepOptions(clip_range=1.0, variance="learned"),
    "learned_range": StepOptions(variance="learned_range"),
}
ROW = torch.tensor([0.9, -0.7, 0.4, 0.3, 0.6, 0.2, 0.1, -4.0, -2.0])


def randn(shape, seed, dtype=torch.float32, mean=0.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean).to(dtype)


def inputs(shape, options, dtype=torch.float32, mean=0.0):
    """Model output, its unguided twin, x_t and noise; a learned variance is positive."""
    output, unguided = randn(shape, 0, dtype, mean), randn(shape, 1, dtype, mean)
    if options.variance != "fixed":
        output, unguided = (torch.cat([half, randn(shape, 4, dtype).abs()], dim=-1) for half in (output, unguided))
    return output, unguided, randn(shape, 2, mean=mean), randn(shape, 3, dtype)


def exact_step(output, unguided, x_t, noise, row, options, scale):
    """The step as its documentation says it, in float64, and the size of the terms that x0 is the sum of."""
    output, unguided, x_t, noise = (tensor.double() for tensor in (output, unguided, x_t, noise))
    c = dict(zip(COLUMNS, row.double().tolist(), strict=True))
    channels = x_t.shape[-1]
    learned, eps, null = output[..., channels:], output[..., :channels], unguided[..., :channels]
    size = abs(c["x0_x"]) * x_t.abs() + abs(c["x0_m"]) * (abs(1 - scale) * null.abs() + scale * eps.abs())
    eps = (1 - scale) * null + scale * eps
    x0 = (c["x0_x"] * x_t + c["x0_m"] * eps) / c["x0_div"]
    if options.clip_range is not None:
        x0 = x0.clamp(-options.clip_range, options.clip_range)
    if options.threshold_ratio is not None:
        pictures = x0.flatten(1)
        s = torch.quantile(pictures.abs(), options.threshold_ratio, dim=1, keepdim=True).clamp(1, options.threshold_max)
        x0 = (pictures.clamp(-s, s) / s).view_as(x0)
    std = {"fixed": lambda: 1.0, "learned": lambda: learned**0.5, "learned_range": lambda: interpolated(learned, c)}
    mean = c["prev_x0"] * x0 + c["prev_x"] * x_t + c["prev_m"] * eps
    return mean + c["sigma"] * std[options.variance]() * noise, x0, size.max() / c["x0_div"]


def interpolated(learned, c):
    fraction = (learned + 1) / 2
    return torch.exp(0.5 * (fraction * c["log_variance_max"] + (1 - fraction) * c["log_variance_min"]))


def assert_close(actual, expected, dtype=torch.float32):
    """Both pictures to within a few roundings of the largest term."""
    *pictures, size = expected
    for ours, exact in zip(actual, pictures, strict=True):
        assert ours.dtype == dtype
        assert ours.isfinite().all()
        assert (ours.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_step_is_the_documented_arithmetic(shape, options):
    output, unguided, x_t, noise = inputs(shape, options)
    expected = exact_step(output, unguided, x_t, noise, ROW, options, scale=2.5)
    actual = denoise_step(output, x_t, ROW, options, noise=noise, unguided=unguided, guidance_scale=2.5)
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=["fp16", "bf16", "fp64"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_half_precision_output_is_stepped_in_float32(options, dtype):
    output, unguided, x_t, noise = inputs((2, 6, 6, 3), options, dtype)
    expected = exact_step(output, unguided, x_t, noise, ROW, options, scale=1.5)
    actual = denoise_step(output, x_t, ROW, options, noise=noise, unguided=unguided, guidance_scale=1.5)
    assert_close(actual, expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_large_mean(options):
    output, unguided, x_t, noise = inputs((2, 8, 8, 3), options, mean=1000.0)
    expected = exact_step(output, unguided, x_t, noise, ROW, options, scale=3.0)
    actual = denoise_step(output, x_t, ROW, options, noise=noise, unguided=unguided, guidance_scale=3.0)
    assert_close(actual, expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_non_contiguous_inputs_give_the_same_bits(options):
    output, unguided, x_t, noise = inputs((2, 8, 8, 3), options)
    strided = [torch.stack([t, t + 1], dim=-1)[..., 0] for t in (output, unguided, x_t, noise)]
    assert not strided[0].is_contiguous()
    expected = denoise_step(output, x_t, ROW, options, noise=noise, unguided=unguided, guidance_scale=2.0)
    output, unguided, x_t, noise = strided
    actual = denoise_step(output, x_t, ROW, options, noise=noise, unguided=unguided, guidance_scale=2.0)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_inputs_are_left_as_they_are():
    tensors = inputs((2, 4, 4, 3), OPTIONS["clip"])
    copies = [tensor.clone() for tensor in tensors]
    output, unguided, x_t, noise = tensors
    denoise_step(output, x_t, ROW, OPTIONS["clip"], noise=noise, unguided=unguided, guidance_scale=2.0)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_guidance_scale_one_is_the_guided_output():
    output, unguided, x_t, _ = inputs((1, 4, 4, 3), OPTIONS["free"])
    guided = denoise_step(output, x_t, ROW, unguided=unguided, guidance_scale=1.0)
    torch.testing.assert_close(guided, denoise_step(output, x_t, ROW))


def test_float64_picture_is_stepped_in_float64():
    options = OPTIONS["learned_range"]
    output, unguided, x_t, noise = inputs((1, 4, 4, 3), options, torch.float64)
    expected = exact_step(output, unguided, x_t, noise, ROW, options, scale=2.0)
    actual = denoise_step(output, x_t.double(), ROW, options, noise=noise, unguided=unguided, guidance_scale=2.0)
    assert_close(actual, expected, torch.float64)


def test_a_picture_is_stepped_alike_in_any_batch():
    options = StepOptions(threshold_ratio=0.95, threshold_max=2.0)
    output, _, x_t, noise = inputs((8, 9, 9, 3), options)
    together = denoise_step(output, x_t, ROW, options, noise=noise)[0]
    for i in range(8):
        alone = denoise_step(output[i : i + 1], x_t[i : i + 1], ROW, options, noise=noise[i : i + 1])[0]
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.995, 1.0])
def test_threshold_takes_torchs_quantile(ratio):
    x0 = randn((3, 11, 13, 3), 0) * 3
    s = torch.quantile(x0.abs().flatten(1), ratio, dim=1).clamp(1, 100).view(3, 1, 1, 1)
    torch.testing.assert_close(dynamic_threshold(x0, ratio, 100.0), x0.clamp(-s, s) / s, rtol=1e-5, atol=1e-6)


def test_threshold_of_a_picture_that_torchs_quantile_refuses():
    x0 = torch.full((1, 4096, 4097, 1), 4.0)
    assert (dynamic_threshold(x0, 0.9, 2.0) == 1).all()


X = torch.zeros(2, 4, 4, 3)
REFUSED = {
    "half-precision-picture": ((X, X.half(), ROW), {}, "x_t is torch.float16"),
    "integer-output": ((X.long(), X, ROW), {}, "model_output is torch.int64"),
    "output-of-another-shape": ((X[:1], X, ROW), {}, "model_output has shape"),
    "output-without-learned-variance": ((X, X, ROW, OPTIONS["learned"]), {}, r"learned variance it is \(2, 4, 4, 6\)"),
    "learned-output-for-a-fixed-variance": ((torch.cat([X, X], -1), X, ROW), {}, "model_output has shape"),
    "noise-of-another-shape": ((X, X, ROW), {"noise": X[..., :1]}, "noise has shape"),
    "integer-noise": ((X, X, ROW), {"noise": X.int()}, "noise is torch.int32"),
    "unguided-of-another-shape": ((X, X, ROW), {"unguided": X[:1]}, "unguided has shape"),
    "float64-row": ((X, X, ROW.double()), {}, "row is torch.float64"),
    "whole-table": ((X, X, ROW[None]), {}, r"row is torch.float32 of shape \(1, 9\)"),
    "row-on-another-device": ((X, X, ROW.to("meta")), {}, "row is on meta"),
    "output-on-another-device": ((X.to("meta"), X, ROW), {}, "model_output is on meta"),
    "scalar-picture": ((X, X.sum(), ROW), {}, "x_t is a scalar"),
}


@pytest.mark.parametrize(("args", "kwargs", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        denoise_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"variance": "fixed_small"}, "variance is"), ({"clip_range": 1.0, "threshold_ratio": 0.9}, "exclude each other")],
    ids=["unknown-variance", "clip-and-threshold"],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        StepOptions(**options)


# Random123's kat_vectors, philox4x32 with 10 rounds
KNOWN_ANSWERS = {
    "zeros": ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    words = [[torch.tensor([int(word, 16)]) for word in text.split()] for text in (counter, key)]
    assert [f"{int(word):08x}" for word in philox4x32(*words)] == answer.split()


TRITON_PHILOX = """
import json, sys, torch, triton, triton.language as tl

@triton.jit
def kernel(out, seed, step, COUNT: tl.constexpr):
    c0 = tl.arange(0, COUNT).to(tl.uint32)
    words = tl.philox(seed, c0, c0 * 0 + step.to(tl.uint32), c0 * 0, c0 * 0)
    for i in tl.static_range(4):
        tl.store(out + 4 * tl.arange(0, COUNT) + i, words[i].to(tl.int64))

answers = []
for seed, step in json.loads(sys.argv[1]):
    out = torch.full((256, 4), -1, dtype=torch.int64)
    kernel[(1,)](out, seed, step, COUNT=256)
    answers.append(out.tolist())
print(json.dumps(answers))
"""


def test_philox_has_tritons_integers(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed here")
    runs = [(0, 0), (7, 1), (2**32 - 1, 999), (2**32, 3), (2**62 + 12345, 2**31 - 1), (-1, 5)]
    script = tmp_path / "philox.py"
    script.write_text(TRITON_PHILOX)
    command = [sys.executable, str(script), json.dumps(runs)]
    result = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    zero = torch.zeros(1, dtype=torch.int64)
    for (seed, step), answer in zip(runs, json.loads(result.stdout), strict=True):
        key = torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32 & 0xFFFFFFFF])
        words = philox4x32((torch.arange(256), zero + step, zero, zero), key)
        assert torch.stack(words, dim=1).tolist() == answer


def test_noise_of_known_words():
    """Seed 0, step 0: the words of the known answer, by Box and Muller's formula."""
    uniform = [(int(word, 16) + 0.5) / 2**32 for word in KNOWN_ANSWERS["zeros"][2].split()]
    expected = []
    for u, v in (uniform[:2], uniform[2:]):
        radius = math.sqrt(-2 * math.log(u))
        expected += [radius * math.cos(2 * math.pi * v), radius * math.sin(2 * math.pi * v)]
    noise = philox_normal(torch.zeros(1, dtype=torch.int64), 0, (2, 2, 1))
    torch.testing.assert_close(noise.flatten(), torch.tensor(expected), rtol=0, atol=1e-6)


def test_noise_is_unit_normal():
    noise = philox_normal(torch.arange(16), 3, (128, 128, 3)).double().flatten(1)
    count = noise.numel()
    assert noise.isfinite().all()
    assert abs(noise.mean()) < 5 / math.sqrt(count)
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((noise**3).mean()) < 5 * math.sqrt(15 / count)
    assert abs((noise**4).mean() - 3) < 5 * math.sqrt(96 / count)
    for width, share in ((1, 0.682689), (2, 0.954500), (3, 0.997300)):
        assert abs((noise.abs() < width).double().mean() - share) < 5 * math.sqrt(share * (1 - share) / count)
    for lag in range(1, 5):  # the four words of a counter, and the next one's
        assert abs((noise[:, lag:] * noise[:, :-lag]).mean()) < 5 / math.sqrt(count)
        assert abs((noise[:, lag:] ** 2 * noise[:, :-lag] ** 2).mean() - 1) < 5 * math.sqrt(8 / count)


def test_steps_and_seeds_do_not_correlate():
    seeds = torch.tensor([0, 1, 2, 2**32 - 1, 2**32, 2**40])
    noise = torch.cat([philox_normal(seeds, step, (64, 64, 3)) for step in range(4)]).flatten(1)
    correlation = torch.corrcoef(noise) - torch.eye(len(noise))
    assert correlation.abs().max() < 5 / math.sqrt(noise.shape[1])


@pytest.mark.parametrize("shape", [(64, 64, 3), (5, 7, 3), (1, 1, 1)], ids=["emoji", "odd", "smallest"])
def test_noise_depends_on_the_seed_alone_not_on_the_batch(shape):
    seeds = torch.tensor([11, 5, 2**32 - 1, 5, 0, 2**63 - 1])
    together = philox_normal(seeds, 9, shape)
    assert together.shape == (6, *shape)
    assert together.dtype == torch.float32
    for i, seed in enumerate(seeds):
        assert torch.equal(philox_normal(seed[None], 9, shape)[0], together[i])
    assert torch.equal(together[1], together[3])


def test_noise_counts_elements_through_the_picture():
    seed = torch.tensor([42])
    long, short = philox_normal(seed, 1, (100,)), philox_normal(seed, 1, (3, 3, 3))
    assert torch.equal(long[:, :27], short.flatten(1))


def test_step_on_the_device_is_the_step():
    seed = torch.tensor([42])
    assert torch.equal(philox_normal(seed, torch.tensor(6), (4, 4, 3)), philox_normal(seed, 6, (4, 4, 3)))


def test_the_extreme_words_give_finite_noise():
    extremes = _box_muller(torch.tensor([[0, 0, 2**32 - 1, 2**32 - 1]]))
    assert extremes.isfinite().all()
    assert extremes[0, 0] == pytest.approx(math.sqrt(2 * 33 * math.log(2)))
    assert extremes[0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize("seeds", [torch.tensor(1), torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32)])
def test_seeds_of_another_kind_are_refused(seeds):
    with pytest.raises(ValueError, match="seeds are"):
        philox_normal(seeds, 0, (4,))
