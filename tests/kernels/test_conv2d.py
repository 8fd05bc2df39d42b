"""conv2d compared with torch in float64: every way of loading, every epilogue, its moments, and its bits."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.conv2d import Conv2dCall, Norm, Shortcut, conv2d
from fastdiff.kernels.host import launching
from fastdiff.kernels.host.weights import k_first
from tests.kernels.test_group_norm import by_torch as norm_by_torch
from tests.support.accuracy import in_dtype, peer_and_truth


@dataclass(frozen=True)
class Case:
    """A convolution with random inputs."""

    n: int
    height: int
    width: int
    channels: tuple[int, ...]
    out_channels: int
    kernel: tuple[int, int] = (3, 3)
    stride: int = 1
    padding: int | tuple[int, int, int, int] = 1
    upsample: bool = False
    temb: bool = False
    residual: bool = False
    shortcut: tuple[int, ...] = ()  # channels
    output_scale: float = 1.0
    mean: float = 0.0  # of the output

    def inputs(self, dtype, device) -> tuple[tuple, dict]:
        """Return the arguments of conv2d. Those of picture i are the same in any batch."""
        random = torch.Generator().manual_seed(0)

        def randn(*shape, scale=1.0):
            return (scale * torch.randn(shape, generator=random)).to(device, dtype)

        def pictures(*shape):
            seeded = (torch.Generator(device).manual_seed(i) for i in range(self.n))
            return torch.stack([torch.randn(shape, generator=each, device=device).to(dtype) for each in seeded])

        taps = self.kernel[0] * self.kernel[1]
        weight = randn(self.out_channels, sum(self.channels), *self.kernel, scale=(sum(self.channels) * taps) ** -0.5)
        bias = randn(self.out_channels) + self.mean
        parts = tuple(pictures(self.height, self.width, c) for c in self.channels)
        options = dict(stride=self.stride, padding=self.padding, upsample=self.upsample, output_scale=self.output_scale)
        if self.temb:
            options["temb"] = pictures(3 * self.out_channels)[:, self.out_channels : 2 * self.out_channels]
        if self.residual:
            left, right, top, bottom = self.padding if isinstance(self.padding, tuple) else (self.padding,) * 4
            height = ((self.height << self.upsample) + top + bottom - self.kernel[0]) // self.stride + 1
            width = ((self.width << self.upsample) + left + right - self.kernel[1]) // self.stride + 1
            options["residual"] = pictures(height, width, self.out_channels)
        if self.shortcut:
            # integers, so that the shortcut's output is exact even if it is rounded before it is added
            parts2 = tuple(pictures(self.height, self.width, c).round() for c in self.shortcut)
            weight2 = randn(self.out_channels, sum(self.shortcut), 1, 1, scale=0.5).round()
            bias2 = randn(self.out_channels).round()
            options["shortcut"] = Shortcut(parts2 if len(parts2) > 1 else parts2[0], weight2, bias2)
        weight = weight.contiguous(memory_format=torch.channels_last)
        return (parts if len(parts) > 1 else parts[0], weight, bias), options


def by_torch(
    x, weight, bias=None, *, stride=1, padding=0, upsample=False,
    temb=None, residual=None, shortcut=None, output_scale=1.0, norm=None,
):  # fmt: skip
    """Return the formula of conv2d's docstring computed by torch, in the dtype of x."""
    x = torch.cat(x, dim=-1) if isinstance(x, tuple) else x
    x = x.permute(0, 3, 1, 2)
    x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3) if upsample else x
    sides = padding if isinstance(padding, tuple) else (padding,) * 4
    y = F.conv2d(F.pad(x, sides), weight, bias, stride).permute(0, 2, 3, 1)
    y = y if temb is None else y + temb[:, None, None]
    residual = residual if shortcut is None else by_torch(*shortcut)
    y = (y if residual is None else y + residual) / output_scale
    return y if norm is None else norm_by_torch(y, **norm._asdict())


def truth(args, options) -> torch.Tensor:
    return in_dtype(torch.float64, by_torch, *args, **options)


def judged(args, options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's result in the arguments' dtype, and the truth."""
    return peer_and_truth(by_torch, args[1].dtype, *args, **options)


def run(args, options, runs_triton: bool):
    """Run conv2d with moments, on its kernel wherever Triton runs."""
    return (conv2d.kernel if runs_triton else conv2d.reference)(*args, moments=True, **options)


gpu = pytest.mark.gpu
CASES = {
    "N2-H8-C64-temb": Case(2, 8, 8, (64,), 64, temb=True),
    "N2-H16-C64-residual": Case(2, 16, 16, (64,), 96, residual=True, output_scale=2**0.5),
    "N1-H4-C896-chunks-over-the-grid": Case(1, 4, 4, (896,), 32, temb=True),
    "N3-H4-C64-many-pictures-a-tile": Case(3, 4, 4, (64,), 64, temb=True, residual=True),
    "N3-H6-C64-patches-of-2x2": Case(3, 6, 6, (64,), 64, temb=True, residual=True),
    "N2-H12-C64-patches-of-2x2-down": Case(2, 12, 12, (64,), 64, stride=2, padding=(0, 1, 0, 1)),
    "N2-H6-C64-patches-of-2x2-up": Case(2, 6, 6, (64,), 32, upsample=True),
    "N1-H6-C896-patches-of-2x2-chunks": Case(1, 6, 6, (896,), 32, temb=True),
    "N2-H3-C64-single-pixels-last": Case(2, 3, 3, (64,), 3),
    "N2-H8-C64-shortcut-C32": Case(2, 8, 8, (64,), 64, temb=True, shortcut=(32,), output_scale=2**0.5),
    "N2-H16-C64-shortcut-C96+40": Case(2, 16, 16, (64,), 32, shortcut=(96, 40)),
    "N2-H7-C36-shortcut-C5+3-odd": Case(2, 7, 7, (36,), 20, shortcut=(5, 3)),
    "N1-H4-C896-shortcut-chunks": Case(1, 4, 4, (896,), 32, shortcut=(64, 32)),
    "N2-H16-C64-down-ddpm": Case(2, 16, 16, (64,), 64, stride=2, padding=(0, 1, 0, 1)),
    "N2-H16-C64-down-symmetric": Case(2, 16, 16, (64,), 64, stride=2, padding=1),
    "N2-H8-C64-up": Case(2, 8, 8, (64,), 32, upsample=True),
    "N2-H8-C64+32-shortcut": Case(2, 8, 8, (64, 32), 40, kernel=(1, 1), padding=0),
    "N2-H8-C64+32-pair-3x3": Case(2, 8, 8, (64, 32), 40, residual=True),
    "N1-H16-C3-first": Case(1, 16, 16, (3,), 64),
    "N1-H16-C4-first-latent": Case(1, 16, 16, (4,), 32),
    "N1-H16-C64-last": Case(1, 16, 16, (64,), 3),
    "N2-H7-W9-C36-odd": Case(2, 7, 9, (36,), 20, temb=True, residual=True),
    "N2-H9-W5-C7+5-odd-down-5x5": Case(2, 9, 5, (7, 5), 9, kernel=(5, 5), stride=2, padding=2),
    "N1-H5-W3-C6-odd-up": Case(1, 5, 3, (6,), 10, upsample=True),
    "N2-L16-C32-one-dimension": Case(2, 1, 16, (32,), 32, kernel=(1, 5), padding=(2, 2, 0, 0)),
    "N2-L13-C14-one-dimension-odd": Case(2, 1, 13, (14,), 32, kernel=(1, 5), padding=(2, 2, 0, 0)),
    "N1-H1-W1-C1-smallest": Case(1, 1, 1, (1,), 1, kernel=(1, 1), padding=0),
    "N2-H8-C32-large-mean": Case(2, 8, 8, (32,), 32, mean=1000.0),
    "N8-C128-H256-residual": pytest.param(Case(8, 256, 256, (128,), 128, residual=True), marks=gpu),
    "N2-C320-H64-temb": pytest.param(Case(2, 64, 64, (320,), 320, temb=True), marks=gpu),
    "N2-C1280-H8-chunks-over-the-grid": pytest.param(Case(2, 8, 8, (1280,), 1280, temb=True), marks=gpu),
    "N64-C1280-H8-chunks-in-a-program": pytest.param(Case(64, 8, 8, (1280,), 1280, temb=True), marks=gpu),
    "N1-C512-H16": pytest.param(Case(1, 16, 16, (512,), 512, temb=True), marks=gpu),
    "N64-C256-H8": pytest.param(Case(64, 8, 8, (256,), 256, temb=True), marks=gpu),
    "N512-C256-H4": pytest.param(Case(512, 4, 4, (256,), 256, residual=True), marks=gpu),
    "N64-C384-H32": pytest.param(Case(64, 32, 32, (384,), 128, temb=True), marks=gpu),
    "N8-C512+256-H32-shortcut": pytest.param(Case(8, 32, 32, (512, 256), 256, kernel=(1, 1), padding=0), marks=gpu),
    "N8-C128-H256-down": pytest.param(Case(8, 256, 256, (128,), 128, stride=2, padding=(0, 1, 0, 1)), marks=gpu),
    "N8-C256-H64-up": pytest.param(Case(8, 64, 64, (256,), 256, upsample=True), marks=gpu),
    "N8-C3-H256-first": pytest.param(Case(8, 256, 256, (3,), 128), marks=gpu),
    "N8-C128-H256-last": pytest.param(Case(8, 256, 256, (128,), 3), marks=gpu),
    "N8-C128-H64-shortcut-C128+256": pytest.param(
        Case(8, 64, 64, (128,), 128, temb=True, shortcut=(128, 256)), marks=gpu
    ),
    "N1-C256-H8-shortcut-C512": pytest.param(Case(1, 8, 8, (256,), 256, shortcut=(512,)), marks=gpu),
    "N2-C224-H96-odd-tiles": pytest.param(Case(2, 96, 96, (224,), 224, residual=True), marks=gpu),
}
REPEATS = 4  # a race shows as an error that changes between repeats


def assert_moments(moments, y: torch.Tensor) -> None:
    """Assert that the moments are those of y, computed in float64."""
    y = y.double().flatten(1, 2)  # (N, H * W, C)
    counts = torch.full(moments.mean.shape[:2], moments.pixels, dtype=torch.float64, device=y.device)
    counts[:, -1] -= counts[0].sum() - y.shape[1]
    mean = (moments.mean * (counts := counts[:, :, None])).sum(1, keepdim=True) / y.shape[1]
    m2 = (moments.m2 + (moments.mean - mean).square() * counts).sum(1)
    assert (counts > 0).all()
    torch.testing.assert_close(mean[:, 0], y.mean(1), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(m2, (y - y.mean(1, keepdim=True)).square().sum(1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_moments(case, dot_dtype, device, runs_triton, loads, assert_accurate):
    args, options = case.inputs(dot_dtype, device)
    torchs, expected = judged(args, options)
    for _ in range(REPEATS if device.type == "cuda" else 1):
        y, moments = run(args, options, runs_triton)
        assert y.is_contiguous()
        assert_accurate(y, torchs, expected)
        if runs_triton:  # the reference leaves moments to the norm
            assert_moments(moments, expected)


ALONE = ["N2-H8-C64-temb", "N1-H4-C896-chunks-over-the-grid", "N3-H4-C64-many-pictures-a-tile", "N2-H8-C64-up",
         "N3-H6-C64-patches-of-2x2", "N1-H6-C896-patches-of-2x2-chunks", "N2-H6-C64-patches-of-2x2-up",
         "N2-H16-C64-down-ddpm", "N2-H8-C64+32-shortcut", "N2-H8-C64-shortcut-C32", "N2-H7-W9-C36-odd",
         "N1-H16-C64-last"]  # fmt: skip
ALONE_ON_GPU = {
    "C128-H32": Case(1, 32, 32, (128,), 128, residual=True),
    "C512-H16": Case(1, 16, 16, (512,), 512, temb=True),
    "C1024-H16-chunks": Case(1, 16, 16, (1024,), 256, temb=True),
    "C1024-H8-up-chunks": Case(1, 8, 8, (1024,), 256, upsample=True),
    "C256-H8": Case(1, 8, 8, (256,), 256, temb=True),
    "C256-H4": Case(1, 4, 4, (256,), 256, residual=True),
    "C256-H6": Case(1, 6, 6, (256,), 256, residual=True),
    "C256-H12-down": Case(1, 12, 12, (256,), 256, stride=2, padding=(0, 1, 0, 1)),
    "C256-H16-shortcut-C256+128": Case(1, 16, 16, (256,), 256, shortcut=(256, 128)),
    "C256+128-H16-shortcut": Case(1, 16, 16, (256, 128), 256, kernel=(1, 1), padding=0),
    "C256-H16-down": Case(1, 16, 16, (256,), 256, stride=2, padding=(0, 1, 0, 1)),
    "C256-H16-up": Case(1, 16, 16, (256,), 256, upsample=True),
    "C3-H64-first": Case(1, 64, 64, (3,), 64),
    "C64-H64": Case(1, 64, 64, (64,), 64, temb=True),
}


def beside(cases: dict[str, Case], on_gpu: dict[str, Case]) -> list:
    """Return cases with the batches to compare. Batches of 8 pictures and the longest cases are marked slow."""
    slow, longest = pytest.mark.slow, ("N1-H6-", "N2-H6-", "N1-H16-", "N1-H4-C896", "N2-H8-C64-up")
    marks = {name: slow if name.startswith(longest) else () for name in cases}
    several = {name: (1, 3, 8) if "many-pictures-a-tile" in name else (1, 3) for name in cases}
    return [
        *(pytest.param(case, several[name], id=name, marks=marks[name]) for name, case in cases.items()),
        *(pytest.param(case, (1, 8), id=f"{name}-beside-7", marks=slow) for name, case in cases.items()),
        *(pytest.param(case, (1, 3, 8, 64), id=name, marks=gpu) for name, case in on_gpu.items()),
    ]


@pytest.mark.parametrize(("case", "batches"), beside({name: CASES[name] for name in ALONE}, ALONE_ON_GPU))
def test_bits_do_not_depend_on_the_batch(case, batches, dot_dtype, device, runs_triton, loads, monkeypatch):
    if not runs_triton:
        pytest.skip("torch's convolutions do not guarantee this")
    # The interpreter multiplies with numpy, whose bits depend on the tile, so all batches use the smallest tile there.
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", 10**6)
    if device.type == "cpu" and (dot_dtype == torch.float32 or loads == "pointers"):
        batches = tuple(n for n in batches if n != 8)
    if batches == (1,):
        pytest.skip("with pointers a tile has one picture: 8 pictures only add the same programs")

    def first_picture(n):
        y, moments = run(*replace(case, n=n).inputs(dot_dtype, device), runs_triton)
        return y[0], moments.mean[0], moments.m2[0], moments.pixels

    alone = first_picture(batches[0])
    for n in batches[1:]:
        for ours, theirs in zip(alone[:3], first_picture(n)[:3], strict=True):
            assert torch.equal(ours, theirs), f"batch {n}"


def row(n: int, length: int, channels: tuple[int, ...], out_channels: int, stride: int = 1) -> Case:
    """Return a convolution with 5 taps over rows of pixels."""
    return Case(n, 1, length, channels, out_channels, kernel=(1, 5), stride=stride, padding=(2, 2, 0, 0))


NORMED = {  # fused if a program has whole groups of whole pictures, otherwise a separate launch
    "H8": (Case(2, 8, 8, (32,), 64, temb=True), 16),
    "H4-many-pictures": (Case(5, 4, 4, (32,), 64, residual=True, output_scale=2**0.5), 1),
    "H4-C96-half-a-tile": (Case(2, 4, 4, (32,), 96, shortcut=(32,)), 24),
    "H6-patches": (Case(3, 6, 6, (32,), 64, temb=True), 16),
    "H8-C36-group-across-tiles": (Case(2, 8, 8, (32,), 72), 6),
    "H16": (Case(2, 16, 16, (32,), 32), 8),
    "H4-C896-chunks": (Case(1, 4, 4, (896,), 32), 8),
    "H7-C36-odd": (Case(2, 7, 7, (36,), 20), 4),
    "large-mean": (Case(2, 8, 8, (32,), 32, mean=1000.0), 8),
    "L16-C32": (row(2, 16, (32,), 32), 8),
    "L4-C40-many-rows-a-tile": (row(5, 4, (40,), 64), 8),
    "L64-C32": (row(1, 64, (32,), 32), 8),
    "L128-C16": (row(1, 128, (16,), 16), 8),
    "L12-C14-odd": (row(3, 12, (14,), 32), 8),
    "L6-C36-odd-groups-of-6": (row(2, 6, (36,), 48), 8),
    "L8-C32+32-pair": (row(2, 8, (32, 32), 64), 8),
    "L16-C32-down": (row(2, 16, (32,), 32, stride=2), 8),
    "L16-C36-down": (row(2, 16, (36,), 32, stride=2), 8),
    "L4-C32-groups-of-64": (row(1, 4, (32,), 128), 2),
    "L300-C8-longer-than-a-program": (row(1, 300, (8,), 16), 2),
    "N1-C256-H8": pytest.param(Case(1, 8, 8, (256,), 256, temb=True), 32, marks=gpu),
    "N64-C256-H8": pytest.param(Case(64, 8, 8, (256,), 256, temb=True), 32, marks=gpu),
    "N64-C256-H12": pytest.param(Case(64, 12, 12, (256,), 256, temb=True), 32, marks=gpu),
    "N512-C256-H4": pytest.param(Case(512, 4, 4, (256,), 256, residual=True), 32, marks=gpu),
    **{
        f"N{n}-L{length}-C{'+'.join(map(str, channels))}": pytest.param(row(n, length, channels, out), 8, marks=gpu)
        for n in (1, 1024)
        for length, channels, out in [(32, (14,), 32), (32, (32,), 32), (4, (256, 256), 128), (128, (32,), 32)]
    },
}


def normed(args, options, num_groups: int, conditioned: bool = False, added: bool = False) -> dict:
    """Return `options` with a norm with random parameters; `added`: with temb and residual after its activation."""
    weight, n = args[1], Conv2dCall(*args, **options).problem.pictures
    random = torch.Generator().manual_seed(1)
    rows = [torch.randn(shape, generator=random).to(weight) for shape in [(len(weight),)] * 2 + [(n, len(weight))] * 2]
    norm = Norm(num_groups, *rows[:2], 1e-5, "mish" if added else "silu", *(rows[2:] if conditioned else ()))
    if added:
        problem = Conv2dCall(*args, **options).problem
        table, residual = (
            torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(100 + i)) for i in range(n)])
            for shape in ((3 * len(weight),), problem.out_shape[1:])
        )
        temb = table.to(weight)[:, len(weight) : 2 * len(weight)]  # columns of a wider table
        norm = norm._replace(temb=temb, residual=residual.to(weight))
    return options | {"norm": norm}


@pytest.mark.parametrize(
    ("conditioned", "added"), [(False, False), (True, False), (True, True)], ids=["plain", "scale-shift", "added"]
)
@pytest.mark.parametrize(("case", "num_groups"), NORMED.values(), ids=NORMED)
def test_norm(case, num_groups, conditioned, added, dot_dtype, device, runs_triton, loads, assert_accurate):
    args, options = case.inputs(dot_dtype, device)
    options = normed(args, options, num_groups, conditioned, added)
    torchs, expected = judged(args, options)
    norm = options["norm"]
    factor = norm.weight.abs().max() * (1 if norm.scale is None else 1 + norm.scale.abs().max())
    lost = torch.finfo(dot_dtype).eps * case.mean * factor  # if the convolution is rounded before its norm
    for _ in range(REPEATS if device.type == "cuda" else 1):
        y = (conv2d.kernel if runs_triton else conv2d.reference)(*args, **options)
        assert_accurate(y, torchs, expected, lost=lost)


ALONE_NORMED = {
    "H4": Case(1, 4, 4, (64,), 64),
    "H8": Case(1, 8, 8, (64,), 64),
    "L4": row(1, 4, (64,), 128),
    "L16": row(1, 16, (64,), 128),
    "L32-first": row(1, 32, (14,), 32),
    "L12-pair": row(1, 12, (64, 64), 64),
    "L128": row(1, 128, (32,), 32),
}


@pytest.mark.parametrize("case", ALONE_NORMED.values(), ids=ALONE_NORMED)
def test_a_normalised_picture_is_the_same_in_any_batch(case, dot_dtype, device, runs_triton, loads, monkeypatch):
    if not runs_triton:
        pytest.skip("torch's convolutions do not guarantee this")
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", 10**6)

    def first_picture(n):
        args, options = replace(case, n=n).inputs(dot_dtype, device)
        return conv2d.kernel(*args, **normed(args, options, 8, added=True))[0]

    alone = first_picture(1)
    for n in (3, 64, 1024) if device.type == "cuda" else (3,):
        assert torch.equal(first_picture(n), alone)


K_FIRST = {
    "L16-C64": row(2, 16, (64,), 64),
    "L12-C14-first": row(3, 12, (14,), 32),
    "L4-C64+64-pair": row(5, 4, (64, 64), 64),
    "L16-C32-down": row(2, 16, (32,), 32, stride=2),
    "H6-C32-two-dimensions": Case(2, 6, 6, (32,), 40),
}


@pytest.mark.parametrize("case", K_FIRST.values(), ids=K_FIRST)
def test_a_float32_weight_laid_k_first_gives_the_same_bits(case, device, runs_triton, exact_matmuls):
    (x, weight, bias), options = case.inputs(torch.float32, device)
    laid = k_first(weight)
    assert torch.equal(laid, weight) and laid.permute(2, 3, 1, 0).is_contiguous()
    ways = [(conv2d.kernel if runs_triton else conv2d.reference)(x, each, bias, **options) for each in (weight, laid)]
    assert torch.equal(*ways)


def test_chunks_in_one_program(dot_dtype, device, runs_triton, loads, assert_accurate, monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", 1)  # GPUs have their own case, with many pictures
    args, options = Case(1, 4, 4, (896,), 32, temb=True).inputs(dot_dtype, device)
    y, _ = run(args, options, runs_triton)
    assert_accurate(y, *judged(args, options))


def test_strided_inputs(dot_dtype, device, runs_triton, loads, assert_accurate):
    (x, weight, bias), options = Case(2, 8, 8, (64,), 32, temb=True, residual=True).inputs(dot_dtype, device)
    wide = torch.cat([x, x], dim=-1)[..., 32:96]
    residual = options["residual"].transpose(1, 2)
    args, options = (wide, weight.contiguous(), bias), options | {"residual": residual}
    assert not any(tensor.is_contiguous() for tensor in (wide, residual, options["temb"]))
    y, _ = run(args, options, runs_triton)
    assert_accurate(y, *judged(args, options))


def test_without_bias(dot_dtype, device, runs_triton, loads, assert_accurate):
    (x, weight, _), options = Case(2, 8, 8, (64,), 32).inputs(dot_dtype, device)
    y, _ = run((x, weight), options, runs_triton)
    assert_accurate(y, *judged((x, weight), options))


X, WEIGHT = torch.zeros(2, 4, 4, 8), torch.zeros(6, 8, 3, 3)


@pytest.mark.parametrize(
    ("argument", "args", "options"),
    [
        pytest.param("x", (X[0], WEIGHT), {}, id="x-without-batch"),
        pytest.param("x", ((X, X[:, :2]), WEIGHT), {}, id="x-pair-of-two-heights"),
        pytest.param("x", (X.long(), WEIGHT), {}, id="x-integers"),
        pytest.param("weight", (X, WEIGHT[:, :5]), {}, id="weight-other-channels"),
        pytest.param("weight", (X, WEIGHT.half()), {}, id="weight-other-dtype"),
        pytest.param("weight", (X, WEIGHT.to("meta")), {}, id="weight-other-device"),
        pytest.param("bias", (X, WEIGHT, torch.zeros(5)), {}, id="bias-other-width"),
        pytest.param("temb", (X, WEIGHT), {"temb": torch.zeros(1, 6)}, id="temb-other-batch"),
        pytest.param("residual", (X, WEIGHT), {"residual": torch.zeros(2, 4, 4, 8)}, id="residual-other-channels"),
        pytest.param("residual", (X, WEIGHT), {"residual": torch.zeros(2, 2, 2, 6).half()}, id="residual-other-dtype"),
        pytest.param(
            "shortcut", (X, WEIGHT), {"shortcut": Shortcut(X, torch.zeros(6, 3, 1, 1))}, id="shortcut-channels"
        ),
        pytest.param(
            "shortcut", (X, WEIGHT), {"shortcut": Shortcut(X.half(), WEIGHT[..., :1, :1].half())}, id="shortcut-dtype"
        ),
        pytest.param("num_groups", (X, WEIGHT), {"norm": Norm(4)}, id="norm-4-groups-of-6-channels"),
        pytest.param("weight", (X, WEIGHT), {"norm": Norm(2, *torch.zeros(2, 5))}, id="norm-other-width"),
        pytest.param("temb", (X, WEIGHT), {"norm": Norm(2, temb=torch.zeros(1, 6))}, id="norm-temb-other-batch"),
        pytest.param("residual", (X, WEIGHT), {"norm": Norm(2, residual=X)}, id="norm-residual-other-channels"),
        pytest.param("moments", (X, WEIGHT), {"norm": Norm(2), "moments": True}, id="moments-and-norm"),
        pytest.param("stride", (X, WEIGHT), {"stride": 3}, id="stride-3"),
        pytest.param("padding", (X[:, :1, :1], WEIGHT), {"padding": 0}, id="padding-too-small"),
    ],
)
def test_wrong_arguments_are_named(argument, args, options):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        conv2d(*args, **{"padding": 1} | options)
