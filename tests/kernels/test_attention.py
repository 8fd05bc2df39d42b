"""Attention compared with float64: all kinds of head widths and numbers of keys, causal, strided, in linear memory."""

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.attention import AttentionCall, attention
from fastdiff.kernels.plans.choices import hopper_obstacle

SHAPES = {  # N, queries, keys, heads, width
    "N2-L48-h2-d64": (2, 48, 48, 2, 64),
    "N1-L77-h3-d8": (1, 77, 77, 3, 8),
    "N2-L33-keys77-h2-d40-odd": (2, 33, 77, 2, 40),
    "N1-L40-h2-d72": (1, 40, 40, 2, 72),
    "N1-L40-h2-d80": (1, 40, 40, 2, 80),
    "N1-L40-h1-d160": (1, 40, 40, 1, 160),
    "N1-L16-h1-d256": (1, 16, 16, 1, 256),
    "N1-L40-keys1-h2-d32": (1, 40, 1, 2, 32),
    "N1-L1-h1-d20-smallest": (1, 1, 1, 1, 20),
    "N1-L150-keys200-h1-d16-several-blocks": (1, 150, 200, 1, 16),
    "N2-L80-h1-d40-rows-not-aligned": (2, 80, 80, 1, 40),
    "N1-L70-h1-d152-rows-not-aligned": (1, 70, 70, 1, 152),
}
REAL_SHAPES = {
    "N8-L256-h1-d512-ddpm256": (8, 256, 256, 1, 512),
    "N64-L256-h1-d256-ddpm32": (64, 256, 256, 1, 256),
    "N1-L1024-h1-d512": (1, 1024, 1024, 1, 512),
    "N2-L4096-h8-d40-sd15": (2, 4096, 4096, 8, 40),
    "N2-L4096-keys77-h8-d40-sd15": (2, 4096, 77, 8, 40),
    "N2-L1024-h8-d80-sd15": (2, 1024, 1024, 8, 80),
    "N2-L256-h8-d160-sd15": (2, 256, 256, 8, 160),
    "N2-L1024-h20-d64-sdxl": (2, 1024, 1024, 20, 64),
    "N16-L256-h16-d72-dit": (16, 256, 256, 16, 72),
    "N2-L1000-keys999-h2-d128": (2, 1000, 999, 2, 128),
}
# N, queries, keys, heads, width for the sm_90 kernels: each plan, at odd sizes and at real sizes
FEW_KEYS = {
    "N2-L40-keys66-h2-d64": (2, 40, 66, 2, 64),
    "N2-L70-keys77-h2-d40": (2, 70, 77, 2, 40),
    "N1-L150-keys80-h1-d48": (1, 150, 80, 1, 48),
    "N1-L70-keys200-h2-d32": (1, 70, 200, 2, 32),
}
HOPPER_SHAPES = {
    "N3-L1100-h3-d40-odd": (3, 1100, 1100, 3, 40),
    "N2-L1100-h5-d64-odd": (2, 1100, 1100, 5, 64),
    "N3-L200-h4-d72-odd": (3, 200, 200, 4, 72),
    "N2-L1025-h3-d80-odd": (2, 1025, 1025, 3, 80),
    "N2-L130-keys99-h2-d160-odd": (2, 130, 99, 2, 160),
    "N3-L250-h2-d256-odd": (3, 250, 250, 2, 256),
    "N2-L70-keys200-h3-d32-odd": (2, 70, 200, 3, 32),
    "N2-L100-keys67-h3-d64-odd": (2, 100, 67, 3, 64),
    "N2-L1-keys2000-h3-d64-odd": (2, 1, 2000, 3, 64),
    "N2-L77-keys8200-h2-d32-odd": (2, 77, 8200, 2, 32),
    "N40-L300-keys13-h16-d80-odd": (40, 300, 13, 16, 80),
    "N2-L4096-h8-d40": (2, 4096, 4096, 8, 40),
    "N1-L8192-h8-d64": (1, 8192, 8192, 8, 64),
    "N1-L16384-h8-d64": (1, 16384, 16384, 8, 64),
    "N2-L4096-h10-d64": (2, 4096, 4096, 10, 64),
    "N2-L1024-h20-d64": (2, 1024, 1024, 20, 64),
    "N2-L1024-h8-d80": (2, 1024, 1024, 8, 80),
    "N2-L256-h16-d72": (2, 256, 256, 16, 72),
    "N32-L256-h16-d72": (32, 256, 256, 16, 72),
    "N64-L256-h1-d256": (64, 256, 256, 1, 256),
    "N1-L256-h1-d256": (1, 256, 256, 1, 256),
    "N2-L256-h8-d160": (2, 256, 256, 8, 160),
    "N64-L256-h4-d32": (64, 256, 256, 4, 32),
    "N2-L4096-keys77-h10-d64": (2, 4096, 77, 10, 64),
    "N2-L1024-keys77-h20-d64": (2, 1024, 77, 20, 64),
    "N2-L4096-keys77-h8-d40": (2, 4096, 77, 8, 40),
}
LAST = 640  # only the last queries are compared with the truth, because its scores take much memory


@pytest.fixture
def attend(runs_triton):
    """The operation; its kernel only, where Triton runs, even where the library is faster."""
    return attention.kernel if runs_triton else attention


@pytest.fixture
def draw(device):
    """q, k and v as in the pipeline: views of fused projections."""
    generator = torch.Generator().manual_seed(0)

    def views(n, queries, keys, heads, width, dtype, mean=0.0):
        shapes = ((n, queries, heads * width, 3), (n, keys, heads * width, 2))
        q, kv = (torch.randn(shape, generator=generator).add(mean).to(device, dtype) for shape in shapes)
        q, kv = (tensor.transpose(2, 3).flatten(2) for tensor in (q, kv))
        return q[..., : heads * width], *kv.chunk(2, dim=-1)

    return views


def by_torch(q, k, v, heads, causal=False, bias=None):
    """Return torch's attention, in the dtype of q."""
    q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    bias = None if bias is None else bias[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal).transpose(1, 2).flatten(2)


def exact(q, k, v, heads, causal=False, bias=None):
    """Return the formula's result in float64."""
    q, k, v = (tensor.double().unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias.double()[:, None, None]
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(attend, draw, dot_dtype, assert_accurate, shape, causal):
    q, k, v = draw(*shape, dot_dtype)
    heads = shape[3]
    y = attend(q, k, v, heads=heads, causal=causal)
    assert y.is_contiguous()
    torchs = by_torch(q, k, v, heads=heads, causal=causal)
    assert_accurate(y, torchs, exact(q, k, v, heads, causal))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL_SHAPES.values(), ids=REAL_SHAPES)
def test_real_shapes_several_times(attend, draw, dtype, assert_accurate, shape):
    if dtype == torch.float32 and shape[4] > 256:
        pytest.skip("heads wider than 256 are for 16 bits")
    q, k, v = draw(*shape, dtype)
    heads = shape[3]
    first = attend(q, k, v, heads=heads)
    assert_accurate(first, by_torch(q, k, v, heads=heads), exact(q, k, v, heads))
    for _ in range(5):
        assert torch.equal(attend(q, k, v, heads=heads), first)


@pytest.fixture
def on_hopper(runs_triton):
    """The operation on its sm_90 kernel, where that can run."""

    def run(q, k, v, **options):
        call = AttentionCall(q, k, v, **options)
        reason = hopper_obstacle(call) if runs_triton else "no Triton runs here"
        if reason is not None:
            pytest.skip(reason)
        return call.hopper()

    return run


@pytest.mark.parametrize("option", ["full", "causal", "bias"])
@pytest.mark.parametrize("shape", FEW_KEYS.values(), ids=FEW_KEYS)
def test_few_keys_stay_on_chip(on_hopper, draw, dot_dtype, assert_accurate, shape, option):
    (n, _, keys, heads, _), (q, k, v) = shape, draw(*shape, dot_dtype)
    biases = torch.linspace(-2, 2, n * keys, device=q.device).view(n, keys).to(dot_dtype)
    options = {"full": {}, "causal": {"causal": True}, "bias": {"bias": biases}}[option]
    y = on_hopper(q, k, v, heads=heads, **options)
    assert y.is_contiguous()
    assert_accurate(y, by_torch(q, k, v, heads=heads, **options), exact(q, k, v, heads, **options))
    options = {name: value[-1:] if name == "bias" else value for name, value in options.items()}
    assert torch.equal(on_hopper(q[-1:], k[-1:], v[-1:], heads=heads, **options), y[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("shape", HOPPER_SHAPES.values(), ids=HOPPER_SHAPES)
def test_accurate_on_hopper(on_hopper, draw, dtype, assert_accurate, shape):
    """Compared with the truth, torch and the generic kernel."""
    q, k, v = draw(*shape, dtype)
    heads = shape[3]
    y = on_hopper(q, k, v, heads=heads)[:, -LAST:]
    truth, q = exact(q[:, -LAST:], k, v, heads), q[:, -LAST:]
    assert_accurate(y, by_torch(q, k, v, heads=heads), truth)
    assert_accurate(y, attention.kernel(q, k, v, heads=heads), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", HOPPER_SHAPES.values(), ids=HOPPER_SHAPES)
def test_bits_on_hopper(on_hopper, draw, shape):
    """The bits are the same in every repeat, alone, in a batch three times as large, and beside a picture of NaN."""
    inputs = draw(*shape, torch.bfloat16)
    heads = shape[3]
    y = on_hopper(*inputs, heads=heads)
    for _ in range(20):
        assert torch.equal(on_hopper(*inputs, heads=heads), y)
    assert torch.equal(on_hopper(*(tensor[-1:] for tensor in inputs), heads=heads), y[-1:])
    thrice = [torch.cat([tensor] * 3) for tensor in inputs]
    assert torch.equal(on_hopper(*thrice, heads=heads), torch.cat([y] * 3))
    for tensor in thrice:
        tensor[1:].fill_(torch.nan)
    assert torch.equal(on_hopper(*thrice, heads=heads)[:1], y[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["causal", "bias"])
@pytest.mark.parametrize("name", [name for name in HOPPER_SHAPES if name.endswith("odd")])
def test_causal_and_masked_on_hopper(on_hopper, draw, assert_accurate, name, option):
    n, _, keys, heads, _ = HOPPER_SHAPES[name]
    q, k, v = draw(*HOPPER_SHAPES[name], torch.bfloat16)
    biases = torch.linspace(-2, 2, n * keys, device=q.device).view(n, keys).to(q.dtype)
    options = {"causal": True} if option == "causal" else {"bias": biases}
    y = on_hopper(q, k, v, heads=heads, **options)
    assert_accurate(y, by_torch(q, k, v, heads=heads, **options), exact(q, k, v, heads, **options))
    for _ in range(5):
        assert torch.equal(on_hopper(q, k, v, heads=heads, **options), y)
    options = options if option == "causal" else {"bias": biases[-1:]}
    assert torch.equal(on_hopper(q[-1:], k[-1:], v[-1:], heads=heads, **options), y[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [-1e4, torch.finfo(torch.bfloat16).min], ids=["-1e4", "least"])
def test_hidden_keys_on_hopper(on_hopper, draw, assert_accurate, hidden):
    q, k, v = draw(2, 300, 300, 2, 80, torch.bfloat16)
    bias = torch.full((2, 300), hidden, dtype=q.dtype, device=q.device)
    bias[:, :9] = 0
    seen = k[:, :9], v[:, :9]
    y = on_hopper(q, k, v, heads=2, bias=bias)
    assert_accurate(y, by_torch(q, *seen, heads=2), exact(q, *seen, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8192, 16384])
def test_memory_is_linear_in_the_sequence(attend, draw, tokens):
    q, k, v = draw(1, tokens, tokens, 8, 64, torch.bfloat16)
    attend(q[:, :64], k, v, heads=8)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = attend(q, k, v, heads=8)
    assert torch.cuda.max_memory_allocated() - before - y.nbytes < 0.1e9


def test_wide_heads_in_16_bit(attend, draw, assert_accurate):
    q, k, v = draw(1, 24, 24, 1, 512, torch.float16)
    y = attend(q, k, v, heads=1)
    assert_accurate(y, by_torch(q, k, v, heads=1), exact(q, k, v, 1))


def test_wider_heads_are_the_references(draw):
    for width, most, dtype in ((320, 256, torch.float32), (640, 512, torch.float16)):
        q, k, v = draw(1, 4, 4, 1, width, dtype)
        assert (
            AttentionCall(q, k, v, heads=1).obstacle() == f"{dtype}: head width {width} exceeds the maximum of {most}"
        )


def test_large_scores(attend, draw, dot_dtype, assert_accurate):
    """Scores of thousands, which float32 rounds by an ulp: the softmax selects one key, or several that tie."""
    q, k, v = draw(1, 40, 70, 2, 32, dot_dtype, mean=20.0)
    y = attend(q, k, v, heads=2)
    lost = torch.finfo(torch.float32).eps * 20**2 * 32**0.5  # of a value's weight; values deviate by 1
    assert_accurate(y, by_torch(q, k, v, heads=2), exact(q, k, v, 2), lost=lost)


def test_scores_beyond_float16(attend, draw, assert_accurate):
    """As with `upcast_attention` in diffusers, scores are float32 for every dtype of q and k."""
    q, k, v = draw(1, 40, 70, 2, 64, torch.float16, mean=40.0)
    assert (q.float() @ k.float().mT).min() > torch.finfo(torch.float16).max
    y = attend(q, k, v, heads=2)
    assert y.isfinite().all()
    assert_accurate(y, by_torch(q, k, v, heads=2), exact(q, k, v, 2))


@pytest.mark.parametrize("shape", ["N2-L48-h2-d64", "N2-L33-keys77-h2-d40-odd", "N1-L40-keys1-h2-d32"])
def test_keys_with_a_bias(attend, draw, dot_dtype, assert_accurate, shape):
    n, _, keys, heads, _ = SHAPES[shape]
    q, k, v = draw(*SHAPES[shape], dot_dtype)
    bias = torch.linspace(-2, 2, n * keys, device=q.device).view(n, keys).to(dot_dtype)
    y = attend(q, k, v, heads=heads, bias=bias)
    assert_accurate(y, by_torch(q, k, v, heads=heads, bias=bias), exact(q, k, v, heads, bias=bias))
    alone = attend(q[-1:], k[-1:], v[-1:], heads=heads, bias=bias[-1:])
    torch.testing.assert_close(alone, y[-1:], rtol=0, atol=4 * torch.finfo(y.dtype).eps)


ADDED = {name: SHAPES[name] for name in SHAPES if "several" not in name and "aligned" not in name} | {
    "N2-L70-keys4-h2-d40-plain-adapter": (2, 70, 4, 2, 40),
    "N1-L33-keys16-h2-d80-plus-adapter": (1, 33, 16, 2, 80),
}


@pytest.mark.parametrize("shape", ADDED.values(), ids=ADDED)
def test_a_residual(attend, draw, randn, dot_dtype, assert_accurate, runs_triton, shape):
    """It has a large mean, and rows that are not contiguous. It may be a result of attention, and stays as it is."""
    q, k, v = draw(*shape, dot_dtype)
    heads = shape[3]
    residual = randn(*q.shape, 2, dtype=dot_dtype, mean=8.0)[..., 0]
    before = residual.clone()
    y = attend(q, k, v, heads=heads, residual=residual)
    assert y.is_contiguous() and torch.equal(residual, before)
    assert_accurate(y, before + by_torch(q, k, v, heads=heads), before.double() + exact(q, k, v, heads))
    if runs_triton:
        assert torch.equal(attend(q[-1:], k[-1:], v[-1:], heads=heads, residual=residual[-1:]), y[-1:])
    else:
        assert torch.equal(y, before + attend(q, k, v, heads=heads))


def test_several_in_turn(attend, draw, dot_dtype, assert_accurate):
    (q, *first), (_, *second) = draw(2, 33, 77, 2, 40, dot_dtype), draw(2, 33, 4, 2, 40, dot_dtype)
    y = attend(q, *second, heads=2, residual=attend(q, *first, heads=2), bias=q.new_zeros(2, 4))
    both = by_torch(q, *first, heads=2) + by_torch(q, *second, heads=2)
    assert_accurate(y, both, exact(q, *first, 2) + exact(q, *second, 2))


def test_hidden_keys_are_as_if_not_there(attend, draw, dot_dtype, assert_accurate):
    q, k, v = draw(1, 20, 77, 2, 40, dot_dtype)
    bias = torch.full((1, 77), -1e4, dtype=dot_dtype, device=q.device)
    bias[:, :9] = 0
    seen = k[:, :9], v[:, :9]
    y = attend(q, k, v, heads=2, bias=bias)
    assert_accurate(y, by_torch(q, *seen, heads=2), exact(q, *seen, 2))


def test_non_contiguous_inputs(attend, draw, dot_dtype, runs_triton):
    """The kernel gives the same bits."""
    q, k, v = draw(2, 20, 30, 2, 40, dot_dtype)
    assert not q.is_contiguous() and not v.is_contiguous()
    y = attend(q, k, v, heads=2)
    copies = [tensor.contiguous() for tensor in (q, k, v)]
    every_second = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in (q, k, v)]
    for inputs in (copies, every_second):
        other = attend(*inputs, heads=2)
        assert torch.equal(other, y) if runs_triton else torch.allclose(other, y, atol=4 * torch.finfo(y.dtype).eps)


@pytest.mark.parametrize("width", [40, 64, 256])
def test_a_picture_attends_alike_in_any_batch(attend, draw, dot_dtype, runs_triton, device, width):
    if not runs_triton:
        pytest.skip("on the CPU the pipeline draws one picture at a time")
    sizes = (1, 3, 8) if device.type == "cpu" else (1, 3, 8, 64)
    q, k, v = draw(sizes[-1], 64, 64, 1, width, dot_dtype)
    together = attend(q, k, v, heads=1)
    for size in sizes:
        assert torch.equal(attend(q[:size], k[:size], v[:size], heads=1), together[:size])
    assert torch.equal(attend(q[-1:], k[-1:], v[-1:], heads=1), together[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "heads", "width"),
    [
        *((256, 1, 256), (256, 1, 512), (64, 1, 512), (256, 4, 32), (1024, 8, 40), (1024, 4, 64), (256, 16, 72)),
        *((78, 4, 10), (300, 2, 30)),  # SDPA would use batched products for these
    ],
    ids=lambda size: str(size),
)
def test_kernel_or_library_a_picture_attends_alike_in_any_batch(draw, dtype, tokens, heads, width):
    q, k, v = draw(64, tokens, tokens, heads, width, dtype)
    together = attention(q, k, v, heads=heads)
    for size in (1, 3, 8):
        assert torch.equal(attention(q[:size], k[:size], v[:size], heads=heads), together[:size])
    assert torch.equal(attention(q[-1:], k[-1:], v[-1:], heads=heads), together[-1:])


def test_nan_stays_with_its_picture(attend, draw):
    q, k, v = draw(2, 20, 20, 1, 16, torch.float32)
    v = v.clone()
    v[0, 3, 2] = torch.nan
    y = attend(q, k, v, heads=1)
    assert y[0, :, 2].isnan().all()
    assert y[1].isfinite().all()


X = torch.zeros(2, 4, 16)
REFUSED = {
    "four-dimensions": ((X[None], X, X, 2), "q: expected"),
    "integers": ((X.int(), X, X, 2), "q: expected"),
    "keys-of-another-batch": ((X, X[:1], X[:1], 2), "k: "),
    "values-of-other-tokens": ((X, X, X[:, :2], 2), "v: "),
    "no-keys": ((X, X[:, :0], X[:, :0], 2), "k: "),
    "keys-of-another-dtype": ((X, X.half(), X, 2), "k: torch.float16"),
    "values-on-another-device": ((X, X, X.to("meta"), 2), "v: torch.float32 on meta"),
    "heads-that-do-not-divide": ((X, X, X, 3), "heads: 3 does not divide the width 16"),
    "no-heads": ((X, X, X, 0), "heads: 0"),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"bias": torch.zeros(2, 3)}, r"bias: expected \(2, 4\)", id="of-other-keys"),
        pytest.param({"residual": X[:, :3]}, r"residual: expected \(2, 4, 16\)", id="of-other-tokens"),
        pytest.param({"residual": X[:1]}, r"residual: expected \(2, 4, 16\)", id="of-another-batch"),
        pytest.param({"residual": X.half()}, "residual: torch.float16", id="residual-of-another-dtype"),
        pytest.param({"bias": torch.zeros(2, 4).half()}, "bias: torch.float16", id="of-another-dtype"),
        pytest.param({"bias": torch.zeros(2, 4), "causal": True}, "bias: it cannot be combined", id="causal"),
    ],
)
def test_what_is_added_and_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        attention(X, X, X, heads=2, **options)


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, message):
    with pytest.raises(ValueError, match=message):
        attention(*args[:3], heads=args[3])
