"""The sm_90 convolution on a card, compared with torch, float64 and the generic kernel; and its bits.

tests/kernels/plans/test_hopper_conv2d.py has the tests that need no card.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from fastdiff.kernels.conv2d import Conv2dCall, Norm, Shortcut, conv2d
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.plans import confirmation
from fastdiff.kernels.plans import hopper_conv2d as hopper
from tests.kernels.test_conv2d import Case, judged, truth

pytestmark = pytest.mark.gpu
CASES = {
    "N8-C128-H256": Case(8, 256, 256, (128,), 128, residual=True),
    "N512-C128-H32": Case(512, 32, 32, (128,), 128, temb=True),
    "N64-C128-H32": Case(64, 32, 32, (128,), 128, residual=True),
    "N64-C256-H16": Case(64, 16, 16, (256,), 256, temb=True),
    "N8-C256-H64": Case(8, 64, 64, (256,), 256),
    "N8-C256-H256": Case(8, 256, 256, (256,), 128, temb=True),
    "N2-C320-H128": Case(2, 128, 128, (320,), 320),
    "N2-C640-H64": Case(2, 64, 64, (640,), 640, residual=True, output_scale=2**0.5),
    "N2-C1280-H32": Case(2, 32, 32, (1280,), 1280, temb=True),
    "N1-C128-H256": Case(1, 256, 256, (128,), 128),
    "N2-C320-H64": Case(2, 64, 64, (320,), 320, temb=True),
    "N8-C512-H16": Case(8, 16, 16, (512,), 512, residual=True),
    "N1-C256-H16-few-tiles": Case(1, 16, 16, (256,), 256, temb=True),
    "N3-C96-H24-W48-odd": Case(3, 24, 48, (96,), 160, temb=True, residual=True),
    "N2-C64-H32-W16": Case(2, 32, 16, (64,), 64),
    "N2-C200-H20-W40-odd": Case(2, 20, 40, (200,), 72, residual=True),
    "N3-C64-H16-W64-K328-odd": Case(3, 16, 64, (64,), 328),
    "N2-C320-H104-W152-sdxl": Case(2, 104, 152, (320,), 320, temb=True),
    "N2-C640-H52-W76-sdxl": Case(2, 52, 76, (640,), 640, residual=True),
    "N8-C128+64-H32-pair": Case(8, 32, 32, (128, 64), 128, residual=True),
    "N2-C64+40-H24-W20-pair-odd": Case(2, 24, 20, (64, 40), 72),
    "N8-C128-H64-shortcut-C256": Case(8, 64, 64, (128,), 128, shortcut=(256,), output_scale=2**0.5),
    "N2-C640-H32-shortcut-C1280+640": Case(2, 32, 32, (640,), 640, shortcut=(1280, 640)),
    "N3-C64-H20-W40-shortcut-C72+40-odd": Case(3, 20, 40, (64,), 72, temb=True, shortcut=(72, 40)),
    "N8-C256-H32-up": Case(8, 32, 32, (256,), 256, upsample=True),
    "N2-C1280-H16-up": Case(2, 16, 16, (1280,), 1280, upsample=True),
    "N1-C72-H12-W20-up-odd": Case(1, 12, 20, (72,), 128, upsample=True, residual=True, temb=True),
}
REPEATS = 10  # a race shows as bits that change between repeats


@pytest.fixture(autouse=True)
def runs_gluon(device):
    reason = confirmation.gluon_obstacle(device)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def half(request) -> torch.dtype:
    return request.param


def run(args, options):
    """Return the output, and the mean and M2 of its moments if it has them."""
    y, moments = conv2d.hopper(*args, moments=True, **options)
    return (y,) if moments is None else (y, moments.mean, moments.m2)


def of(pictures, value):
    """Return copies of some pictures of an argument of conv2d."""
    if isinstance(value, Shortcut):
        return value._replace(x=of(pictures, value.x))
    if isinstance(value, tuple):
        return tuple(of(pictures, part) for part in value)
    return value[pictures].clone()


def batch_of(pictures, args, options):
    """Return the arguments of conv2d for some pictures of a batch."""
    named = ("temb", "residual", "shortcut")
    return (of(pictures, args[0]), *args[1:]), {
        key: of(pictures, value) if key in named else value for key, value in options.items()
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output(case, half, device, assert_accurate):
    args, options = case.inputs(half, device)
    torchs, expected = judged(args, options)
    twin = conv2d.kernel(*args, **options)
    y, *_ = run(args, options)
    assert y.is_contiguous()
    assert_accurate(y, torchs, expected)
    assert_accurate(y, twin, expected)


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_moments(case, mean, device, exact_matmuls):
    (x, weight, bias), options = case.inputs(torch.bfloat16, device)
    bias = bias + mean
    made = Conv2dCall(x, weight, bias, **options).problem
    result = run((x, weight, bias), options)
    pixels = hopper.moments_pixels(made)
    if pixels is None:
        assert len(result) == 1
        return
    means, m2 = (each.double() for each in result[1:])
    assert means.shape == m2.shape == (made.pictures, made.pixels // pixels, made.out_channels)
    y = truth((x, weight, bias), options)
    expected, spread = y.mean((1, 2)), y.flatten(1, 2).std(1, correction=0)
    got = means.mean(1)
    squares = m2.sum(1) + pixels * (means - got[:, None]).square().sum(1)
    assert ((got - expected).abs() <= (1e-3 if mean else 1e-4) * spread).all()
    torch.testing.assert_close(squares, spread.square() * made.pixels, rtol=1e-3, atol=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits(case, device, monkeypatch):
    args, options = case.inputs(torch.bfloat16, device)
    assert_bits(args, options, (16, 8), monkeypatch)


def assert_bits(args, options, heights, monkeypatch):
    """Assert that bits do not change between repeats, nor with the batch, the other pictures or the tile heights."""
    first = run(args, options)
    n, device = len(first[0]), first[0].device

    def check(others, pictures=slice(None)):
        for ours, theirs in zip(first, others, strict=True):
            assert torch.equal(ours[pictures], theirs)

    for _ in range(REPEATS):
        check(run(args, options))
    check(run(*batch_of(slice(n - 1, n), args, options)), slice(n - 1, n))
    if first[0].numel() < 2**26:
        tripled = run(*batch_of(torch.arange(3 * n, device=device) % n, args, options))
        check([each[n : 2 * n] for each in tripled])
    for rows, whole in product(heights, (True, False)):
        monkeypatch.setattr(hopper, "cut", cut_into(rows, whole))
        check(run(args, options))
    monkeypatch.undo()
    if n > 1:
        for part in args[0] if isinstance(args[0], tuple) else (args[0],):
            part[0] = float("nan")
        check([each[1:] for each in run(args, options)], slice(1, None))


def cut_into(rows: int, whole: bool):
    """Return a `cut` with tiles of `rows` rows: all whole, or all but the first in halves if the moments allow it."""

    def cut(problem, multiprocessors):
        grid_rows, columns = hopper.grid_of(problem)
        across = -(-problem.out_channels // 64) << (problem.mode == "up")
        count = problem.pictures * -(-columns // 16) * -(-grid_rows // rows) * across
        pixels = rows * 8 // (2 if problem.fp8 else 1)  # of a warp group in half a tile
        halved = not whole and pixels >= (hopper.moments_pixels(problem) or 0)
        return hopper.ConvTiles(rows, 1 if halved else count, 2 * count - 1 if halved else count)

    return cut


def test_the_norm_after_it_reads_its_moments(device, assert_accurate):
    case = replace(CASES["N2-C320-H64"], mean=100.0)
    args, options = case.inputs(torch.bfloat16, device)
    torchs, expected = judged(args, options | {"norm": Norm(32, activation="silu")})
    lost = torch.finfo(torch.bfloat16).eps * case.mean  # y is rounded before its norm
    y, moments = conv2d.hopper(*args, moments=True, **options)
    twin, twins_moments = conv2d.kernel(*args, moments=True, **options)
    ours, twins = (
        group_norm.kernel(x, 32, eps=1e-5, activation="silu", moments=known)
        for x, known in ((y, moments), (twin, twins_moments))
    )
    for peer in (torchs, twins):
        assert_accurate(ours, peer, expected, lost=lost)


def test_a_graph_gives_the_same_bits(device, monkeypatch):
    """In a graph, each launch begins before the previous launch has ended."""
    monkeypatch.undo()  # poisoning would add launches between them
    args, options = CASES["N64-C128-H32"].inputs(torch.bfloat16, device)
    second = options | {"residual": None}

    def chain():
        y = conv2d.hopper(*args, **options)
        for _ in range(4):
            y = conv2d.hopper(y, *args[1:], **second)
        return y

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(REPEATS):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)
