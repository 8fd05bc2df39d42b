"""linear compared with torch in float64: every way of loading, every epilogue, RMSNorm before it, and its bits."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.host import launching
from fastdiff.kernels.linear import LinearCall, linear
from fastdiff.kernels.plans import choices
from fastdiff.kernels.plans import hopper_linear as on_hopper
from fastdiff.kernels.plans.choices import hopper_obstacle
from tests.kernels.plans.by_plan import by_plan
from tests.support.accuracy import in_dtype, peer_and_truth

ACTIVATIONS = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


@dataclass(frozen=True)
class Case:
    """A linear layer with random inputs."""

    n: int
    tokens: int
    channels: int
    out_channels: int
    bias: bool = True
    activation: str | None = None
    gate: bool = False
    residual: bool = False
    rms_norm: float | None = None  # eps
    mean: float = 0.0  # of x

    def inputs(self, dtype, device) -> tuple[tuple, dict]:
        """Return the arguments of linear. Those of picture i are the same in any batch."""
        seeds = [torch.Generator(device).manual_seed(i) for i in (*range(self.n), 1000)]

        def randn(*shape, seed=seeds[-1]):
            return torch.randn(shape, generator=seed, device=device).to(dtype)

        def pictures(*shape):
            return torch.stack([randn(*shape, seed=seed) for seed in seeds[:-1]])

        weight = randn(self.out_channels, self.channels) * self.channels**-0.5
        options = {"bias": randn(self.out_channels) if self.bias else None, "activation": self.activation}
        if self.gate:
            options["gate"] = pictures(3 * self.out_channels)[:, self.out_channels : 2 * self.out_channels]
        if self.residual:
            options["residual"] = pictures(self.tokens, self.out_channels)
        if self.rms_norm is not None:
            options["rms_norm"] = (1 + randn(self.channels) / 4, self.rms_norm)
        return (pictures(self.tokens, self.channels) + self.mean, weight), options


def by_torch(x, weight, bias=None, *, activation=None, gate=None, residual=None, rms_norm=None):
    """Return the formula of linear's docstring computed by torch, in the dtype of x."""
    if rms_norm is not None:
        x = F.rms_norm(x, x.shape[-1:], *rms_norm)
    y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    y = y if gate is None else y * gate[:, None]
    return y if residual is None else y + residual


def truth(args, options) -> torch.Tensor:
    return in_dtype(torch.float64, by_torch, *args, **options)


def judged(args, options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's result in the arguments' dtype, and the truth."""
    return peer_and_truth(by_torch, args[0].dtype, *args, **options)


@pytest.fixture
def run(runs_triton):
    """The operation; its kernel only, where Triton runs, even where the library is faster."""
    return linear.kernel if runs_triton else linear


gpu = pytest.mark.gpu
CASES = {
    "N2-L64-C128-qkv": Case(2, 64, 128, 384),
    "N2-L48-C64-fc1": Case(2, 48, 64, 256, activation="gelu_tanh"),
    "N2-L48-C256-fc2": Case(2, 48, 256, 64, gate=True, residual=True),
    "N2-L40-C64-gelu-by-erf": Case(2, 40, 64, 64, activation="gelu"),
    "N1-L77-C64-quick-gelu": Case(1, 77, 64, 256, activation="quick_gelu"),
    "N5-L1-C64-time-embedding": Case(5, 1, 64, 72, activation="silu"),
    "N2-L40-C96-rms-norm": Case(2, 40, 96, 64, bias=False, rms_norm=1e-6),
    "N1-L40-C64-rms-norm-of-a-large-mean": Case(1, 40, 64, 64, rms_norm=1e-6, mean=100.0),
    "N3-L13-C64-gate-of-few-tokens": Case(3, 13, 64, 40, gate=True),
    "N2-L33-C72-residual": Case(2, 33, 72, 40, residual=True),
    "N2-L21-C36-odd": Case(2, 21, 36, 20, activation="gelu_tanh", gate=True, residual=True),
    "N2-L21-C7-odd-rms-norm": Case(2, 21, 7, 9, gate=True, rms_norm=1e-5),
    "N1-L1-C1-smallest": Case(1, 1, 1, 1),
    "N1-L40-C32-large-mean": Case(1, 40, 32, 32, mean=1000.0),
    "N2-L256-C1152-qkv": pytest.param(Case(2, 256, 1152, 3456), marks=gpu),
    "N32-L256-C1152-qkv": pytest.param(Case(32, 256, 1152, 3456), marks=gpu),
    "N2-L256-C1152-fc1": pytest.param(Case(2, 256, 1152, 4608, activation="gelu_tanh"), marks=gpu),
    "N32-L256-C1152-fc1": pytest.param(Case(32, 256, 1152, 4608, activation="gelu_tanh"), marks=gpu),
    "N2-L256-C4608-fc2": pytest.param(Case(2, 256, 4608, 1152, gate=True, residual=True), marks=gpu),
    "N32-L256-C4608-fc2": pytest.param(Case(32, 256, 4608, 1152, gate=True, residual=True), marks=gpu),
    "N512-L256-C256-unet-qkv": pytest.param(Case(512, 256, 256, 768), marks=gpu),
    "N1-L256-C512-unet-qkv": pytest.param(Case(1, 256, 512, 1536), marks=gpu),
    "N32-L256-C1152-rms-norm": pytest.param(Case(32, 256, 1152, 3456, bias=False, rms_norm=1e-6), marks=gpu),
    "N32-L256-C1152-rms-norm-bias": pytest.param(Case(32, 256, 1152, 3456, rms_norm=1e-6), marks=gpu),
    "N2-L256-C1152-rms-norm-bias": pytest.param(Case(2, 256, 1152, 3456, rms_norm=1e-6), marks=gpu),
    "N2-L77-C768-odd-tokens": pytest.param(Case(2, 77, 768, 768, gate=True, residual=True), marks=gpu),
    "N50-L1-C1152-modulation": pytest.param(Case(50, 1, 1152, 6912), marks=gpu),
}
REPEATS = 4  # a race shows as an error that changes between repeats


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output(case, dot_dtype, device, run, loads, assert_accurate):
    args, options = case.inputs(dot_dtype, device)
    torchs, expected = judged(args, options)
    for _ in range(REPEATS if device.type == "cuda" else 1):
        y = run(*args, **options)
        assert y.is_contiguous()
        assert_accurate(y, torchs, expected)


LIBRARY_CASES = {
    "N2-L256-C1152-qkv": Case(2, 256, 1152, 3456),
    "N32-L256-C1152-fc1": Case(32, 256, 1152, 4608, activation="gelu_tanh"),
    "N2-L256-C1152-fc1-strided": Case(2, 256, 1152, 4608, activation="gelu_tanh"),
    "N3-L256-C4608-fc2": Case(3, 256, 4608, 1152),
}


@gpu
@pytest.mark.parametrize("name", LIBRARY_CASES)
def test_output_of_the_library(name, device, assert_accurate):
    (x, weight), options = LIBRARY_CASES[name].inputs(torch.bfloat16, device)
    torchs, expected = judged((x, weight), options)
    x = torch.cat([x, x], dim=-1)[..., : x.shape[-1]] if "strided" in name else x
    assert_accurate(linear(x, weight, **options), torchs, expected)


@pytest.mark.parametrize(("pictures", "fastest"), [(2, True), (4, True), (8, False), (32, False)])
def test_the_library_is_for_few_tokens_alone(pictures, fastest, monkeypatch):
    """On sm_90, where the library gives our bits."""
    monkeypatch.setattr(choices, "card_of", lambda device: choices.SM_90)
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    weight = torch.empty(3456, 1152, dtype=torch.bfloat16, device="meta")

    def call(**options):
        return LinearCall(weight.new_empty(pictures, 256, 1152), weight, **options)

    assert (choices.decide(call()).way == "library") == fastest
    assert choices.decide(call(activation="gelu_tanh")).way != "library"
    assert call().hopper_plan() == "linear 1152 to 3456"


HOPPER_CASES = {
    "N2-L256-C1152-fc1": Case(2, 256, 1152, 4608, activation="gelu_tanh"),
    "N2-L256-C1152-qkv": Case(2, 256, 1152, 3456),
    "N6-L77-C768-odd": Case(6, 77, 768, 3072, activation="quick_gelu"),
    "N6-L77-C72-odd-channels": Case(6, 77, 72, 4232, bias=False, activation="gelu"),
    "N2-L1024-C1280-ff2": Case(2, 1024, 5120, 1280, residual=True),
    "N32-L256-C1152-fc1-in-turn": Case(32, 256, 1152, 4608, activation="gelu_tanh"),
    "N2-L4096-C640-ff2-in-turn": Case(2, 4096, 2560, 640, residual=True),
    "N2-L4096-C320-in-turn": Case(2, 4096, 320, 960, bias=False),
    "N3-L2001-C200-odd-in-turn": Case(3, 2001, 200, 1016, activation="silu", residual=True),
    "N3-L2001-C72-one-step-and-an-eighth-in-turn": Case(3, 2001, 72, 1016, residual=True),
}


@gpu
@pytest.mark.parametrize("case", HOPPER_CASES.values(), ids=HOPPER_CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_on_hopper(case, dtype, device, assert_accurate):
    """The kernel is accurate, and has the bits of the generic kernel: in every repeat, alone, and beside NaN."""
    args, options = case.inputs(dtype, device)
    reason = hopper_obstacle(LinearCall(*args, **options))
    if reason is not None:
        pytest.skip(reason)
    assert on_hopper.fills_card(case.n * case.tokens, args[1])
    y = linear.hopper(*args, **options)
    assert_accurate(y, *judged(args, options))
    assert torch.equal(y, linear.kernel(*args, **options))
    for _ in range(20):
        assert torch.equal(linear.hopper(*args, **options), y)
    x, weight = args
    residual = options.pop("residual", None)

    def run(x, residual):
        return by_plan(linear, x, weight, residual=residual, **options)

    assert torch.equal(run(x[-1:], None if residual is None else residual[-1:]), y[-1:])
    beside = torch.cat([x[:1], torch.full_like(x, torch.nan)])
    both = None if residual is None else torch.cat([residual[:1], residual])
    assert torch.equal(run(beside, both)[:1], y[:1])


ALONE = ["N2-L48-C64-fc1", "N2-L48-C256-fc2", "N3-L13-C64-gate-of-few-tokens", "N2-L40-C96-rms-norm",
         "N2-L33-C72-residual", "N2-L21-C36-odd"]  # fmt: skip
ALONE_ON_GPU = {
    "L256-C1152-qkv": Case(1, 256, 1152, 3456),
    "L256-C1152-fc1": Case(1, 256, 1152, 4608, activation="gelu_tanh"),
    "L256-C4608-fc2": Case(1, 256, 4608, 1152, gate=True, residual=True),
    "L256-C1152-out": Case(1, 256, 1152, 1152, gate=True, residual=True),
    "L256-C1152-out-alone": Case(1, 256, 1152, 1152),
    "L256-C4608-fc2-alone": Case(1, 256, 4608, 1152),
    "L256-C256-unet-qkv": Case(1, 256, 256, 768),
    "L256-C512-unet-qkv": Case(1, 256, 512, 1536),
    "L77-C768": Case(1, 77, 768, 768, gate=True),
    "L256-C1152-rms-norm": Case(1, 256, 1152, 3456, bias=False, rms_norm=1e-6),
    "L1-C1152-modulation": Case(1, 1, 1152, 6912),
}


@pytest.mark.parametrize(
    ("case", "batches"),
    [
        *(pytest.param(CASES[name], (1, 3), id=name) for name in ALONE),
        *(pytest.param(CASES[name], (1, 8), id=f"{name}-beside-7", marks=pytest.mark.slow) for name in ALONE),
        *(pytest.param(case, (1, 3, 8, 64), id=name, marks=gpu) for name, case in ALONE_ON_GPU.items()),
    ],
)
def test_bits_do_not_depend_on_the_batch(case, batches, dot_dtype, device, runs_triton, loads, monkeypatch):
    """Test the operation itself, which may run a shape by torch's library."""
    if not runs_triton:
        pytest.skip("torch's products do not guarantee this")
    # The interpreter multiplies with numpy, whose bits depend on the tile, so all batches use the smallest tile there.
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", 10**6)

    def run(n, pictures=slice(None)):
        (x, weight), options = replace(case, n=n).inputs(dot_dtype, device)
        options = {name: v[pictures] if name in ("gate", "residual") else v for name, v in options.items()}
        return linear(x[pictures], weight, **options)

    alone, together = run(batches[0])[0], run(batches[-1])
    for n in batches[1:]:
        assert torch.equal(run(n)[0], alone), f"batch {n}"
    if device.type == "cuda":  # numpy's bits depend on the row of the tile, too
        assert torch.equal(run(batches[-1], slice(-1, None))[0], together[-1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.filterwarnings("ignore:overflow")  # numpy warns of an infinite exponential in Triton's interpreter
def test_activations_of_huge_values_are_finite(run, device, activation):
    x = torch.tensor([-1e14, -1e4, -30.0, 0.0, 30.0, 1e4, 1e14], device=device)[None, :, None]
    y = run(x, torch.ones(1, 1, device=device), activation=activation)
    torch.testing.assert_close(y, ACTIVATIONS[activation](x))


def test_strided_inputs(dot_dtype, device, run, loads, assert_accurate):
    (x, weight), options = Case(2, 24, 64, 32, gate=True, residual=True).inputs(dot_dtype, device)
    views = {
        "channels-of-a-wider-tensor": torch.cat([x, x, x], dim=-1)[..., 64:128],
        "every-second-token": torch.stack([x, x], dim=2)[:, :, 0],
        "transposed": x.mT.contiguous().mT,
        "first-tokens": torch.cat([x, x], dim=1)[:, :24],
    }
    options["residual"] = torch.cat([options["residual"]] * 2, dim=-1)[..., :32]
    torchs, expected = judged((x, weight), options)
    for view in views.values():
        assert not view.is_contiguous()
        assert_accurate(run(view, weight, **options), torchs, expected)
    assert_accurate(run(x, weight.T.contiguous().T, **options), torchs, expected)


def test_rms_norm_without_weight(dot_dtype, device, run, loads, assert_accurate):
    args, options = Case(2, 24, 64, 32, rms_norm=1e-6).inputs(dot_dtype, device)
    options["rms_norm"] = (None, 1e-6)
    assert_accurate(run(*args, **options), *judged(args, options))


def test_gate_in_float32(dot_dtype, device, run, assert_accurate):
    args, options = Case(2, 24, 64, 32, gate=True).inputs(dot_dtype, device)
    options["gate"] = options["gate"].float()
    assert_accurate(run(*args, **options), *judged(args, options))


def test_nan_stays_with_its_token(device, run, loads, dot_dtype):
    (x, weight), _ = Case(2, 24, 64, 32).inputs(dot_dtype, device)
    x[0, 3, 5] = torch.nan
    y = run(x, weight)
    assert y[0, 3].isnan().all()
    assert y[0, 4:].isfinite().all() and y[1].isfinite().all()


@pytest.mark.gpu
def test_projections_side_by_side_are_one_linear(device, dtype, run):
    """The fused QKV projection has the bits of three separate projections."""
    (x, weight), options = Case(2, 256, 1152, 3456).inputs(dtype, device)
    parts = [run(x, w, b) for w, b in zip(weight.chunk(3), options["bias"].chunk(3), strict=True)]
    assert torch.equal(run(x, weight, options["bias"]), torch.cat(parts, dim=-1))


X, WEIGHT = torch.zeros(2, 4, 8), torch.zeros(6, 8)
REFUSED = {
    "two-dimensions": ((X[0], WEIGHT), {}, "x: expected"),
    "integers": ((X.long(), WEIGHT), {}, "x: expected"),
    "no-channels": ((X[..., :0], WEIGHT[:, :0]), {}, "x: expected"),
    "weight-of-other-channels": ((X, WEIGHT[:, :5]), {}, "weight: expected"),
    "weight-in-half": ((X, WEIGHT.half()), {}, "weight: torch.float16"),
    "weight-on-another-device": ((X, WEIGHT.to("meta")), {}, "weight: torch.float32 on meta"),
    "bias-of-another-width": ((X, WEIGHT, torch.zeros(5)), {}, "bias: expected"),
    "unknown-activation": ((X, WEIGHT), {"activation": "swish"}, "activation: 'swish'"),
    "gate-of-another-batch": ((X, WEIGHT), {"gate": torch.zeros(1, 6)}, "gate: expected"),
    "gate-of-integers": ((X, WEIGHT), {"gate": torch.zeros(2, 6).int()}, "gate: torch.int32"),
    "residual-of-other-channels": ((X, WEIGHT), {"residual": X}, "residual: expected"),
    "residual-in-half": ((X, WEIGHT), {"residual": torch.zeros(2, 4, 6).half()}, "residual: torch.float16"),
    "rms-norm-of-other-channels": ((X, WEIGHT), {"rms_norm": (torch.zeros(6), 1e-6)}, "rms_norm: expected"),
}


@pytest.mark.parametrize(("args", "kwargs", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, kwargs, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        linear(*args, **kwargs)


def test_operations_of_no_tokens(device):
    y = linear(torch.zeros(0, 4, 8, device=device), torch.zeros(6, 8, device=device))
    assert y.shape == F.linear(torch.zeros(0, 4, 8), WEIGHT).shape
