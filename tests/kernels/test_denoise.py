"""The denoise step compared with float64 arithmetic, and its kernel compared with its reference."""

import math
import os

import pytest
import torch

from fastdiff.kernels.denoise import COLUMNS, EARLIER, StepOptions, denoise_step, dynamic_threshold
from fastdiff.kernels.host.philox import philox_normal
from fastdiff.samplers.shared.from_config import scheduler_from_config
from tests.support.pairwise import each_sampler

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETER else "cpu")
launches = pytest.mark.usefixtures("runs_triton")  # run in the interpreter too
SHAPES = {
    "N4-H64-W64-C3-emoji": (4, 64, 64, 3),
    "N1-H5-W7-C3-odd": (1, 5, 7, 3),
    "N1-H1-W1-C1-smallest": (1, 1, 1, 1),
    "N2-L31-C2-one-dimension": (2, 31, 2),
}
OPTIONS = {
    "free": StepOptions(),
    "clip": StepOptions(),
    "threshold": StepOptions(threshold_ratio=0.9, threshold_max=1.7),
    "learned": StepOptions(variance="learned"),
    "learned_range": StepOptions(variance="learned_range"),
}
BASIC = (0.9, -0.7, 0.4, 0.3, 0.6, 0.2, 0.1, -4.0, -2.0)
KEEPING = (0.8, -0.3, 0.25, -0.15, 0.5, -0.6, 0.7, 0.35, -0.45, 0.55, 1.5, -1.25, 0.75)


def row_of(*coefficients, **others):
    """Return a row of these coefficients, in the order of COLUMNS, and of others by name; the rest is zero."""
    named = dict(zip(COLUMNS, coefficients, strict=False)) | others
    return torch.tensor([named.get(name, 0.0) for name in COLUMNS], device=DEVICE)


ROW, CLIPS = row_of(*BASIC), {"clip": 0.5, "learned": 1.0}
ROWS = {name: row_of(*BASIC, clip_range=CLIPS.get(name, 0.0)) for name in OPTIONS}
MULTISTEP = {
    name: row_of(*BASIC, *KEEPING, clip_range=CLIPS.get(name, 0.0), reads_earlier=1.0, keeps_output=1.0)
    for name in OPTIONS
}


def randn(shape, seed, dtype=torch.float32, mean=0.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean).to(DEVICE, dtype)


def inputs(shape, options, dtype=torch.float32, mean=0.0):
    """Return model output, unguided output, x_t and noise. A learned variance is positive."""
    output, unguided = randn(shape, 0, dtype, mean), randn(shape, 1, dtype, mean)
    if options.variance != "fixed":
        output, unguided = (torch.cat([half, randn(shape, 4, dtype).abs()], dim=-1) for half in (output, unguided))
    return output, unguided, randn(shape, 2, mean=mean), randn(shape, 3, dtype)


def exact_step(output, unguided, x_t, noise, row, options, scale):
    """Return the documented step in float64, and the size of the terms whose sum is x0."""
    output, unguided, x_t, noise = (tensor.double() for tensor in (output, unguided, x_t, noise))
    c = dict(zip(COLUMNS, row.double().tolist(), strict=True))
    channels = x_t.shape[-1]
    learned, eps, null = output[..., channels:], output[..., :channels], unguided[..., :channels]
    size = abs(c["x0_x"]) * x_t.abs() + abs(c["x0_m"]) * (abs(1 - scale) * null.abs() + scale * eps.abs())
    eps = (1 - scale) * null + scale * eps
    x0 = (c["x0_x"] * x_t + c["x0_m"] * eps) / c["x0_div"]
    if c["clip_range"] > 0:
        x0 = x0.clamp(-c["clip_range"], c["clip_range"])
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
    """Assert that each picture is within a few roundings of the largest term."""
    *pictures, size = expected
    for ours, exact in zip(actual, pictures, strict=True):
        assert ours.dtype == dtype
        assert ours.isfinite().all()
        assert (ours.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * size


@launches
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_step_is_the_documented_arithmetic(shape, name):
    options, row = OPTIONS[name], ROWS[name]
    output, unguided, x_t, noise = inputs(shape, options)
    expected = exact_step(output, unguided, x_t, noise, row, options, scale=2.5)
    actual = denoise_step(output, x_t, row, options, noise=noise, unguided=unguided, guidance_scale=2.5)
    assert_close(actual, expected)


@launches
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=["fp16", "bf16", "fp64"])
@pytest.mark.parametrize("name", OPTIONS)
def test_half_precision_output_is_stepped_in_float32(name, dtype):
    options, row = OPTIONS[name], ROWS[name]
    output, unguided, x_t, noise = inputs((2, 6, 6, 3), options, dtype)
    expected = exact_step(output, unguided, x_t, noise, row, options, scale=1.5)
    actual = denoise_step(output, x_t, row, options, noise=noise, unguided=unguided, guidance_scale=1.5)
    assert_close(actual, expected)


@launches
@pytest.mark.parametrize("name", OPTIONS)
def test_large_mean(name):
    options, row = OPTIONS[name], ROWS[name]
    output, unguided, x_t, noise = inputs((2, 8, 8, 3), options, mean=1000.0)
    expected = exact_step(output, unguided, x_t, noise, row, options, scale=3.0)
    actual = denoise_step(output, x_t, row, options, noise=noise, unguided=unguided, guidance_scale=3.0)
    assert_close(actual, expected)


@launches
@pytest.mark.parametrize("name", OPTIONS)
def test_non_contiguous_inputs_give_the_same_bits(name):
    options, row = OPTIONS[name], ROWS[name]
    output, unguided, x_t, noise = inputs((2, 8, 8, 3), options)
    strided = [torch.stack([t, t + 1], dim=-1)[..., 0] for t in (output, unguided, x_t, noise)]
    assert not strided[0].is_contiguous()
    expected = denoise_step(output, x_t, row, options, noise=noise, unguided=unguided, guidance_scale=2.0)
    output, unguided, x_t, noise = strided
    actual = denoise_step(output, x_t, row, options, noise=noise, unguided=unguided, guidance_scale=2.0)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@launches
def test_inputs_are_left_as_they_are():
    output, unguided, x_t, noise = tensors = inputs((2, 4, 4, 3), OPTIONS["clip"])
    copies = [tensor.clone() for tensor in tensors]
    denoise_step(output, x_t, ROWS["clip"], OPTIONS["clip"], noise=noise, unguided=unguided, guidance_scale=2.0)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


@launches
def test_guidance_scale_one_is_the_guided_output():
    output, unguided, x_t, _ = inputs((1, 4, 4, 3), OPTIONS["free"])
    guided = denoise_step(output, x_t, ROW, OPTIONS["free"], unguided=unguided, guidance_scale=1.0)
    torch.testing.assert_close(guided, denoise_step(output, x_t, ROW, OPTIONS["free"]))


@launches
def test_float64_picture_is_stepped_in_float64():
    options = OPTIONS["learned_range"]
    output, unguided, x_t, noise = inputs((1, 4, 4, 3), options, torch.float64)
    expected = exact_step(output, unguided, x_t, noise, ROW, options, scale=2.0)
    actual = denoise_step(output, x_t.double(), ROW, options, noise=noise, unguided=unguided, guidance_scale=2.0)
    assert_close(actual, expected, torch.float64)


@launches
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


@pytest.mark.slow
def test_threshold_of_a_picture_that_torchs_quantile_refuses():
    x0 = torch.full((1, 4096, 4097, 1), 4.0)
    assert (dynamic_threshold(x0, 0.9, 2.0) == 1).all()


def steps_of(pictures, step):
    return torch.full((pictures,), step, dtype=torch.int32, device=DEVICE)


def earlier_tensors(shape):
    return torch.stack([randn(shape, 10 + i) for i in range(EARLIER)], dim=1)


@launches
@pytest.mark.parametrize("keeps", [0.0, 1.0], ids=["forgets-its-output", "keeps-its-output"])
@pytest.mark.parametrize("name", OPTIONS)
def test_earlier_outputs_and_an_earlier_sample(name, keeps):
    options, row = OPTIONS[name], MULTISTEP[name].clone()
    row[COLUMNS.index("keeps_output")] = keeps
    output, unguided, x_t, noise = inputs((2, 5, 7, 3), options)
    earlier = earlier_tensors(x_t.shape)
    mean, x0, size = exact_step(output, unguided, x_t, noise, row, options, scale=1.0)
    s, h1, h2, h3 = earlier.double().unbind(1)
    x, m, c = x_t.double(), output[..., :3].double(), dict(zip(COLUMNS, row.double().tolist(), strict=True))
    y = c["y_x"] * x + c["y_x0"] * x0 + c["y_s"] * s + c["y_h1"] * h1 + c["y_h2"] * h2 + c["y_h3"] * h3
    x_prev = mean + c["prev_y"] * y + c["prev_h1"] * h1 + c["prev_h2"] * h2 + c["prev_h3"] * h3
    kept = c["keep_x"] * x + c["keep_x0"] * x0 + c["keep_m"] * m
    outputs = (kept, h1, h2) if keeps else (h1, h2, h3)  # the latest first; the oldest is lost
    actual = denoise_step(output, x_t, row, options, noise=noise, earlier=earlier)
    assert_close(actual, (x_prev, x0, torch.stack([y, *outputs], dim=1), 2 * size))


@launches
def test_without_earlier_ones_their_columns_are_not_read():
    output, _, x_t, noise = inputs((1, 4, 4, 3), OPTIONS["clip"])
    expected = denoise_step(output, x_t, ROWS["clip"], OPTIONS["clip"], noise=noise)
    actual = denoise_step(output, x_t, MULTISTEP["clip"], OPTIONS["clip"], noise=noise)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_row_that_reads_no_earlier_ones_leaves_them_alone(step_kernel):
    """A graph of every sampler gives each of them the memory of a multistep sampler, which may hold anything."""
    output, _, x_t, noise = inputs((2, 4, 4, 3), OPTIONS["clip"])
    expected = step_kernel(output, x_t, ROWS["clip"], OPTIONS["clip"], noise=noise)
    earlier = torch.full((2, EARLIER, 4, 4, 3), math.nan, device=DEVICE)
    actual = step_kernel(output, x_t, ROWS["clip"], OPTIONS["clip"], noise=noise, earlier=earlier)[:2]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@launches
@pytest.mark.parametrize("of_each", [False, True], ids=["a-table", "a-table-for-each-picture"])
def test_each_picture_has_its_row_and_its_guidance(of_each):
    output, unguided, x_t, _ = inputs((3, 5, 7, 3), OPTIONS["free"])
    table, seeds = torch.stack([ROW, ROWS["clip"], ROW / 2]), torch.tensor([3, 1, 2**40], device=DEVICE)
    step, scale = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE), torch.tensor([1.5, 4, 0.5], device=DEVICE)
    tables, free = torch.stack([table, table.flip(0), table / 2] if of_each else [table] * 3), OPTIONS["free"]
    given = {"noise": seeds, "unguided": unguided, "guidance_scale": scale}
    together = denoise_step(output, x_t, tables if of_each else table, free, step=step, **given)
    for i, own in enumerate(tables):
        one, noise = slice(i, i + 1), philox_normal(seeds[i : i + 1], int(step[i]), x_t.shape[1:])
        given = {"noise": noise, "unguided": unguided[one], "guidance_scale": scale[i].item()}
        alone = denoise_step(output[one], x_t[one], own[step[i]], free, **given)
        torch.testing.assert_close([each[one] for each in together], [*alone], rtol=1e-6, atol=1e-6)


@pytest.fixture
def step_kernel(runs_triton):
    """The kernel; skips where it cannot run."""
    if not runs_triton:
        pytest.skip("the kernel runs on a GPU or in Triton's interpreter")
    return denoise_step.kernel


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["free", "clip"])
def test_kernel_has_the_references_bits(step_kernel, shape, name, dtype):
    output, unguided, x_t, noise = inputs(shape, OPTIONS[name], dtype)
    arguments = {"noise": noise, "unguided": unguided, "guidance_scale": 2.5}
    expected = denoise_step.reference(output, x_t, ROWS[name], OPTIONS[name], **arguments)
    actual = step_kernel(output, x_t, ROWS[name], OPTIONS[name], **arguments)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernel_with_earlier_ones_has_the_references_bits(step_kernel, shape, dtype):
    output, unguided, x_t, noise = inputs(shape, OPTIONS["clip"], dtype)
    arguments = {"noise": noise, "unguided": unguided, "guidance_scale": 2.5, "earlier": earlier_tensors(shape)}
    expected = denoise_step.reference(output, x_t, MULTISTEP["clip"], OPTIONS["clip"], **arguments)
    actual = step_kernel(output, x_t, MULTISTEP["clip"], OPTIONS["clip"], **arguments)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", each_sampler())
def test_kernel_runs_the_rows_of_every_sampler(step_kernel, name):
    """Each step of a run is one launch, with the reference's bits."""
    schedule = scheduler_from_config({}, name).schedule(4).to(DEVICE)
    earlier = earlier_tensors((2, 3, 5, 3)) if schedule.multistep else None
    for i, draws in enumerate(schedule.draws_noise):
        output, _, x_t, noise = inputs((2, 3, 5, 3), schedule.options)
        arguments = {"noise": noise if draws else None, "step": steps_of(2, i), "earlier": earlier}
        expected = denoise_step.reference(output, x_t, schedule.rows, schedule.options, **arguments)
        actual = step_kernel(output, x_t, schedule.rows, schedule.options, **arguments)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), f"step {i + 1}"


def test_kernel_draws_the_references_noise(step_kernel):
    row = torch.zeros(10, len(COLUMNS), device=DEVICE)  # makes x_{t-1} equal the noise
    row[:, COLUMNS.index("x0_div")] = row[:, COLUMNS.index("sigma")] = 1
    seeds = torch.tensor([0, 7, 2**32 - 1, 2**62 + 12345, -1], device=DEVICE)
    x = torch.zeros(5, 31, 3, device=DEVICE)
    noise, _ = step_kernel(x, x, row, OPTIONS["free"], noise=seeds, step=steps_of(5, 9))
    torch.testing.assert_close(noise, philox_normal(seeds, 9, (31, 3)), rtol=1e-6, atol=1e-7)


@launches
@pytest.mark.parametrize("name", ["clip", "threshold", "learned", "learned_range"])
def test_the_step_picks_its_row_and_its_noise(name):
    options = OPTIONS[name]
    output, unguided, x_t, _ = inputs((3, 5, 7, 3), options)
    seeds = torch.tensor([3, 1, 2**40], device=DEVICE)
    guided = {"unguided": unguided, "guidance_scale": 1.5}
    for i in range(3):
        row = ROWS[name]
        table = torch.stack([row / 2, row, row / 3]).roll(i, 0)
        step = steps_of(3, (1 + i) % 3)
        noise = philox_normal(seeds, step.long(), x_t.shape[1:])
        expected = denoise_step(output, x_t, row, options, noise=noise, **guided)
        actual = denoise_step(output, x_t, table, options, noise=seeds, step=step, **guided)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@launches
@pytest.mark.parametrize("name", ["learned", "learned_range"])
def test_without_sigma_a_learned_variance_may_be_anything(name):
    output, _, x_t, noise = inputs((1, 4, 4, 3), OPTIONS[name])
    output[..., 3:] = -1000
    row = ROWS[name].clone()
    row[COLUMNS.index("sigma")] = 0
    expected = denoise_step(output, x_t, row, OPTIONS[name])
    actual = denoise_step(output, x_t, row, OPTIONS[name], noise=noise)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@launches
def test_nan_of_the_model_stays_nan():
    output, _, x_t, _ = inputs((1, 4, 4, 3), OPTIONS["clip"])
    output[0, 1, 2, 0] = math.nan
    for picture in denoise_step(output, x_t, ROWS["clip"], OPTIONS["clip"]):
        assert picture.isnan().sum() == 1


@pytest.mark.gpu
def test_a_graph_replays_the_steps_of_a_chain():
    """Each replay reads its row at the counter on the device, which the graph itself increments."""
    row = ROWS["clip"]
    table, seeds = torch.stack([row, row / 2, row / 3, row / 4]), torch.arange(8, device=DEVICE)
    output, unguided, x_t, _ = inputs((8, 32, 32, 3), OPTIONS["clip"], torch.bfloat16)
    expected = x_t
    for i in range(4):
        noise = philox_normal(seeds, i, x_t.shape[1:])
        guided = {"unguided": unguided, "guidance_scale": 3.0}
        expected, _ = denoise_step(output, expected, table[i], OPTIONS["clip"], noise=noise, **guided)

    step, x = steps_of(8, 0), x_t.clone()

    def run():
        x_prev, _ = denoise_step(output, x, table, OPTIONS["clip"], noise=seeds, step=step, **guided)
        x.copy_(x_prev)
        step.add_(1)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    x.copy_(x_t)
    step.zero_()
    for _ in range(4):
        graph.replay()
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-5)


X = torch.zeros(2, 4, 4, 3, device=DEVICE)
STEP = torch.zeros(2, dtype=torch.int32, device=DEVICE)
KEPT = torch.zeros(2, EARLIER, 4, 4, 3, device=DEVICE)
SEEDS = torch.zeros(2, dtype=torch.int64, device=DEVICE)
REFUSED = {
    "half-precision-picture": ((X, X.half(), ROW), {}, "x_t is torch.float16"),
    "integer-output": ((X.long(), X, ROW), {}, "model_output is torch.int64"),
    "output-of-another-shape": ((X[:1], X, ROW), {}, "model_output has shape"),
    "output-without-learned-variance": ((X, X, ROW, OPTIONS["learned"]), {}, r"expected \(2, 4, 4, 6\) with x_t"),
    "learned-output-for-a-fixed-variance": ((torch.cat([X, X], -1), X, ROW), {}, "model_output has shape"),
    "noise-of-another-shape": ((X, X, ROW), {"noise": X[..., :1]}, "noise has shape"),
    "integer-noise": ((X, X, ROW), {"noise": X.int()}, "noise is torch.int32"),
    "unguided-of-another-shape": ((X, X, ROW), {"unguided": X[:1]}, "unguided has shape"),
    "float64-row": ((X, X, ROW.double()), {}, "row is torch.float64"),
    "whole-table": ((X, X, ROW[None]), {}, rf"row has shape \(1, {len(COLUMNS)}\)"),
    "row-on-another-device": ((X, X, ROW.to("meta")), {}, "row is on meta"),
    "step-of-int64": ((X, X, ROW[None]), {"step": STEP.long()}, "step is torch.int64"),
    "row-for-a-step": ((X, X, ROW), {"step": STEP}, rf"row has shape \({len(COLUMNS)},\)"),
    "step-of-another-batch": ((X, X, ROW[None]), {"step": STEP[:1]}, "step has shape"),
    "too-few-earlier": ((X, X, ROW), {"earlier": KEPT[:, :2]}, "earlier has shape"),
    "earlier-of-another-shape": ((X, X, ROW), {"earlier": KEPT[:1]}, "earlier has shape"),
    "earlier-of-another-dtype": ((X, X, ROW), {"earlier": KEPT.half()}, "earlier is torch.float16"),
    "guidance-of-another-batch": ((X, X, ROW), {"guidance_scale": X[:1, 0, 0, 0]}, "guidance_scale has shape"),
    "seeds-without-a-step": ((X, X, ROW), {"noise": SEEDS}, "noise is torch.int64"),
    "seeds-of-another-batch": ((X, X, ROW[None]), {"step": STEP, "noise": SEEDS[:1]}, "noise has shape"),
    "output-on-another-device": ((X.to("meta"), X, ROW), {}, "model_output is on meta"),
    "scalar-picture": ((X, X.sum(), ROW), {}, "x_t is a scalar"),
}


@pytest.mark.parametrize(("args", "kwargs", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        denoise_step(*args[:3], *(args[3:] or [OPTIONS["free"]]), **kwargs)


def test_an_unknown_variance_is_named():
    with pytest.raises(ValueError, match="variance is"):
        StepOptions(variance="fixed_small")
