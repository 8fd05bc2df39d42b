"""LayerNorm and RMSNorm compared with float64: with a residual before, scale and shift after, and large means."""

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.layer_norm import layer_norm
from tests.support.accuracy import peer_and_truth

SHAPES = {  # N, L, C
    "N2-L16-C64": (2, 16, 64),
    "N2-L9-C1152-dit": (2, 9, 1152),
    "N3-L7-C36-odd": (3, 7, 36),
    "N1-L5-C7-odd": (1, 5, 7),
    "N1-L1-C1-smallest": (1, 1, 1),
    "N1-L2-C3000-wide": (1, 2, 3000),
    "N32-L256-C1152-dit": pytest.param((32, 256, 1152), marks=pytest.mark.gpu),
    "N2-L256-C1152-dit": pytest.param((2, 256, 1152), marks=pytest.mark.gpu),
    "N8-L1024-C320-sd15": pytest.param((8, 1024, 320), marks=pytest.mark.gpu),
}
EPS = 1e-5


@pytest.fixture
def norm(runs_triton):
    """The operation; its kernel only, where Triton runs."""
    return layer_norm.kernel if runs_triton else layer_norm


@pytest.fixture(params=[False, True], ids=["layer", "rms"])
def rms(request):
    return request.param


def by_torch(
    x, weight=None, bias=None, *, rounded, rms=False, residual=None, branch_norm=None, gate=None, scale=None, shift=None
):
    """Return the operation computed by torch in the dtype of x. The sum with `residual` is rounded to `rounded`."""
    x = x if branch_norm is None else F.rms_norm(x, x.shape[-1:], *branch_norm)
    x = x if gate is None else x * gate[:, None]
    x = x if residual is None else (x + residual).to(rounded).to(x.dtype)
    shape = x.shape[-1:]
    y = F.rms_norm(x, shape, weight, EPS) if rms else F.layer_norm(x, shape, weight, bias, EPS)
    y = y if scale is None else y * (1 + scale[:, None])
    return y if shift is None else y + shift[:, None]


def judged(x, *rows, **options):
    """Return torch's result for the arguments of layer_norm, and the truth."""
    return peer_and_truth(by_torch, x.dtype, x, *rows, rounded=x.dtype, **options)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(norm, randn, dtype, rms, assert_accurate, shape):
    x, table = randn(*shape, dtype=dtype), randn(shape[0], 6 * shape[2], dtype=dtype)
    options = dict(zip(("shift", "scale"), table.chunk(6, dim=1), strict=False), rms=rms)
    y = norm(x, eps=EPS, **options)
    assert y.is_contiguous()
    assert_accurate(y, *judged(x, **options))


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
def test_weight_bias_and_residual(norm, randn, dtype, rms, assert_accurate, runs_triton, device, modulated):
    if runs_triton and device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates float32 to bfloat16 instead of rounding")
    x, residual = randn(2, 6, 48, dtype=dtype), randn(2, 6, 2, 48, dtype=dtype)[:, :, 0]  # strided tokens
    weight, bias = randn(48), None if rms else randn(48)
    options = {"rms": rms, "residual": residual}
    if modulated:
        options |= {"scale": randn(2, 48), "shift": randn(2, 48)}
    y, total = norm(x, weight, bias, eps=EPS, **options)
    assert torch.equal(total, x + residual) and total.is_contiguous()
    assert_accurate(y, *judged(x, weight, bias, **options))


def test_gated_residual(norm, randn, dtype, assert_accurate, runs_triton, device):
    if runs_triton and device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates float32 to bfloat16 instead of rounding")
    x, residual, table = randn(3, 6, 48, dtype=dtype), randn(3, 6, 48, dtype=dtype), randn(3, 144)
    options = dict(zip(("gate", "scale", "shift"), table.chunk(3, dim=1), strict=True), residual=residual)
    y, total = norm(x, eps=EPS, **options)
    gate = options["gate"][:, None]
    assert_accurate(total, x * gate.to(dtype) + residual, x.double() * gate.double() + residual.double())
    assert_accurate(y, *judged(x, **options))


@pytest.mark.parametrize(
    "shape", [(2, 4, 48), (1, 3, 1152), (2, 3, 7), pytest.param((2, 4160, 3840), marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_branch_that_is_normalised_first(norm, randn, dtype, rms, assert_accurate, runs_triton, device, shape, gated):
    """As in Z-Image: gate and residual come after an RMSNorm of the branch, and another norm after them."""
    if runs_triton and device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates float32 to bfloat16 instead of rounding")
    n, _, width = shape
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    options = {"rms": rms, "residual": residual, "branch_norm": (1 + randn(width), 1e-2), "scale": randn(n, width)}
    if gated:
        options["gate"] = randn(n, 2 * width, dtype=dtype)[:, width:]
    weight = randn(width)
    y, total = norm(x, weight, eps=EPS, **options)
    branch = F.rms_norm(x.double(), (width,), options["branch_norm"][0].double(), 1e-2)
    truth = residual + branch * (options["gate"][:, None].double() if gated else 1)
    assert_accurate(total, truth.to(dtype), truth)
    assert_accurate(y, *judged(x, weight, **options))
    if runs_triton:
        part = {name: each[-1:] for name, each in options.items() if name in ("residual", "gate", "scale")}
        alone = norm(x[-1:], weight, eps=EPS, **options | part)
        assert torch.equal(alone[0], y[-1:]) and torch.equal(alone[1], total[-1:])


def test_weight_alone_and_bias_alone(norm, randn, dtype, assert_accurate):
    x, row = randn(2, 6, 48, dtype=dtype), randn(48)
    for options in ({"weight": row}, {"bias": row}):
        assert_accurate(norm(x, **options, eps=EPS), *judged(x, **options))


def test_scale_without_shift(norm, randn, dtype, rms, assert_accurate):
    """Z-Image's norms have a weight, a scale and no shift."""
    x, row, scale = randn(3, 6, 48, dtype=dtype), randn(48), randn(3, 96, dtype=dtype)[:, ::2]
    assert_accurate(norm(x, row, eps=EPS, rms=rms, scale=scale), *judged(x, row, rms=rms, scale=scale))


@pytest.mark.parametrize("mean", [100.0, 1000.0, 1e5])
@pytest.mark.parametrize("width", [64, 1152])
def test_large_mean(norm, randn, assert_accurate, width, mean):
    """x has a standard deviation of 1, and its float32 mean has an error of up to an ulp."""
    x = randn(2, 4, width, mean=mean)
    assert_accurate(norm(x, eps=EPS), *judged(x), lost=torch.finfo(torch.float32).eps * mean)


def test_large_mean_in_16_bits(norm, randn, dtype, assert_accurate):
    x = randn(2, 4, 1152, dtype=dtype, mean=100.0)
    assert_accurate(norm(x, eps=EPS), *judged(x))


def test_programs_of_several_tokens(norm, randn, dtype, monkeypatch):
    """The bits are the same as with one program per token."""
    x, table = randn(3, 7, 48, dtype=dtype), randn(3, 144)
    options = dict(zip(("gate", "scale", "shift"), table.chunk(3, dim=1), strict=True), residual=x.flip(1))
    alone = norm(x, eps=EPS, **options)
    monkeypatch.setattr("fastdiff.kernels.layer_norm.PROGRAMS", 4)
    for y, own in zip(norm(x, eps=EPS, **options), alone, strict=True):
        assert torch.equal(y, own)


def test_constant_token_is_its_shift(norm, randn, dtype, device):
    x = torch.full((1, 3, 48), 3.0, dtype=dtype, device=device)
    scale, shift = randn(1, 48, dtype=dtype), randn(1, 48, dtype=dtype)
    torch.testing.assert_close(norm(x, eps=EPS, scale=scale, shift=shift), shift[:, None].expand_as(x))


def test_non_contiguous_inputs(norm, randn, dtype, rms, runs_triton):
    """The kernel gives the same bits."""
    views = {
        "channels-of-a-wider-tensor": randn(2, 6, 96, dtype=dtype)[..., 32:64],
        "every-second-channel": randn(2, 6, 64, dtype=dtype)[..., ::2],
        "transposed": randn(2, 32, 6, dtype=dtype).mT,
        "first-tokens": randn(2, 9, 32, dtype=dtype)[:, :6],
    }
    for name, x in views.items():
        assert not x.is_contiguous()
        ours = norm(x, eps=EPS, rms=rms, residual=x)
        copies = norm(x.contiguous(), eps=EPS, rms=rms, residual=x.contiguous())
        for y, copy in zip(ours, copies, strict=True):
            same = torch.equal(y, copy) if runs_triton else torch.allclose(y, copy, torch.finfo(dtype).eps, 1e-6)
            assert same, name


def test_a_token_is_normalised_alike_in_any_batch(norm, randn, dtype, rms, runs_triton, device):
    if not runs_triton:
        pytest.skip("on the CPU the pipeline draws one picture at a time")
    x, table = randn(*((64, 16) if device.type == "cuda" else (8, 3)), 96, dtype=dtype), randn(64, 192)
    scale, shift = table[: len(x)].chunk(2, dim=1)
    together = norm(x, eps=EPS, rms=rms, scale=scale, shift=shift)
    for n in (1, 3, 8):
        assert torch.equal(norm(x[:n], eps=EPS, rms=rms, scale=scale[:n], shift=shift[:n]), together[:n])
    assert torch.equal(norm(x[-1:], eps=EPS, rms=rms, scale=scale[-1:], shift=shift[-1:]), together[-1:])


X, ROW, TABLE = torch.zeros(2, 4, 8), torch.zeros(8), torch.zeros(2, 8)
REFUSED = {
    "two-dimensions": (X[0], {}, "x: expected"),
    "integers": (X.int(), {}, "x: expected"),
    "no-channels": (X[..., :0], {}, "x: expected"),
    "weight-of-another-width": (X, {"weight": ROW[:4]}, "weight: expected"),
    "bias-on-another-device": (X, {"bias": ROW.to("meta")}, "bias: torch.float32 on meta"),
    "bias-of-rms-norm": (X, {"bias": ROW, "rms": True}, "bias: RMSNorm has none"),
    "residual-of-another-shape": (X, {"residual": X[:1]}, "residual: expected"),
    "residual-in-half": (X, {"residual": X.half()}, "residual: torch.float16"),
    "branch-norm-alone": (X, {"branch_norm": (ROW, EPS)}, "branch_norm: give residual too"),
    "branch-norm-of-another-width": (X, {"residual": X, "branch_norm": (ROW[:4], EPS)}, "branch_norm: expected"),
    "branch-norm-elsewhere": (X, {"residual": X, "branch_norm": (ROW.to("meta"), EPS)}, "branch_norm: torch.float32"),
    "gate-of-another-batch": (X, {"residual": X, "gate": TABLE[:1]}, "gate: expected"),
    "gate-alone": (X, {"gate": TABLE}, "gate: give residual too"),
    "shift-alone": (X, {"shift": TABLE}, "shift: give scale too"),
    "shift-of-another-batch": (X, {"scale": TABLE, "shift": TABLE[:1]}, "shift: expected"),
}


@pytest.mark.parametrize(("x", "kwargs", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(x, kwargs, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        layer_norm(x, eps=EPS, **kwargs)
