"""Attention with a number of keys for each picture, and with grouped keys, compared with float64."""

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.attention import attention
from fastdiff.kernels.plans.choices import hopper_obstacle
from tests.support.accuracy import peer_and_truth

SHAPES = {  # N, queries, heads of queries and of keys, width of a head, the keys of each picture, all keys
    "N3-L70-h2-d40": (3, 70, 2, 2, 40, (70, 33, 1), 70),
    "N2-L48-keys160-h4+2-d64-grouped": (2, 48, 4, 2, 64, (160, 97), 160),
    "N2-L20-keys130-h6+2-d16-grouped": (2, 20, 6, 2, 16, (65, 128), 130),
    "N2-L20-keys90-h2+1-d128": (2, 20, 2, 1, 128, (64, 90), 90),
    "N1-L5-keys9-h3+1-d20-smallest": (1, 5, 3, 1, 20, (9,), 9),
    "N2-L4192-h30-d128-z-image": pytest.param((2, 4192, 30, 30, 128, (4160, 4192), 4192), marks=pytest.mark.gpu),
    "N3-L512-h32+8-d128-qwen3": pytest.param((3, 512, 32, 8, 128, (512, 77, 300), 512), marks=pytest.mark.gpu),
}
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture
def attend(runs_triton):
    """The operation; its kernel only, where Triton runs."""
    return attention.kernel if runs_triton else attention


@pytest.fixture
def draw(randn, device):
    """q, k and v as columns of a fused projection, and the numbers of keys. Keys after them are NaN."""

    def make(n, queries, heads, key_heads, width, lengths, keys, dtype):
        q = randn(n, queries, 2 * heads * width, dtype=dtype)[..., : heads * width]
        kv = randn(n, keys, 2 * key_heads * width, dtype=dtype)
        for row, length in zip(kv, lengths, strict=True):
            row[length:] = torch.nan
        return q, *kv.chunk(2, dim=-1), torch.tensor(lengths, dtype=torch.int32, device=device)

    return make


def by_torch(q, k, v, lengths, heads, causal):
    """Return torch's attention of each picture to copies of its own keys, in the dtype of q."""

    def of_one(q, k, v):
        q, k, v = (each.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(0, 1)[None] for each in (q, k, v))
        k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1).flatten(1)

    return torch.stack([of_one(q[i], k[i, :length], v[i, :length]) for i, length in enumerate(lengths)])


@MASKS
@EACH
def test_shapes(attend, draw, dot_dtype, assert_accurate, shape, causal):
    q, k, v, lengths = draw(*shape, dot_dtype)
    heads = shape[2]
    y = attend(q, k, v, heads=heads, causal=causal, lengths=lengths)
    assert y.is_contiguous()
    assert_accurate(y, *peer_and_truth(by_torch, dot_dtype, q, k, v, lengths.tolist(), heads=heads, causal=causal))


@MASKS
@EACH
def test_a_picture_has_the_bits_of_its_own_keys_alone(attend, draw, dot_dtype, shape, causal, runs_triton):
    if not runs_triton:
        pytest.skip("on the CPU a model runs one picture at a time")
    q, k, v, lengths = draw(*shape, dot_dtype)
    options = {"heads": shape[2], "causal": causal}
    together = attend(q, k, v, lengths=lengths, **options)
    assert torch.equal(attend(q.flip(0), k.flip(0), v.flip(0), lengths=lengths.flip(0), **options), together.flip(0))
    for i, length in enumerate(lengths.tolist()):
        assert torch.equal(attend(q[i:], k[i:], v[i:], lengths=lengths[i:], **options), together[i:])
        if length >= 64:
            own = q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length]
            assert torch.equal(attend(*own, **options), together[i : i + 1])
            assert torch.equal(attend(*own, lengths=lengths[i : i + 1], **options), together[i : i + 1])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_grouped_keys_have_the_bits_of_copies(attend, randn, dot_dtype, causal):
    q, k, v = randn(2, 40, 10 * 16, dtype=dot_dtype).split((6 * 16, 2 * 16, 2 * 16), dim=-1)
    copies = [each.unflatten(-1, (2, 16)).repeat_interleave(3, dim=2).flatten(2) for each in (k, v)]
    options = {"heads": 6, "causal": causal}
    assert torch.equal(attend(q, k, v, **options), attend(q, *copies, **options))


@pytest.mark.gpu
@MASKS
def test_on_hopper(draw, assert_accurate, causal, runs_triton):
    """The plan of sm_90, which is off until it is measured."""
    q, k, v, lengths = draw(3, 4192, 30, 30, 128, (4160, 4192, 1100), 4192, torch.bfloat16)
    options = {"heads": 30, "causal": causal}
    reason = hopper_obstacle(attention.parse(q, k, v, lengths=lengths, **options)) if runs_triton else "no Triton here"
    if reason is not None:
        pytest.skip(reason)
    y = attention.hopper(q, k, v, lengths=lengths, **options)
    assert_accurate(y, *peer_and_truth(by_torch, torch.bfloat16, q, k, v, lengths.tolist(), **options))
    for _ in range(20):
        assert torch.equal(attention.hopper(q, k, v, lengths=lengths, **options), y)
    for i, length in enumerate(lengths.tolist()):
        own = q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length]
        assert torch.equal(attention.hopper(*own, lengths=lengths[i : i + 1], **options), y[i : i + 1])


def test_a_residual(attend, draw, randn, dot_dtype):
    q, k, v, lengths = draw(2, 33, 4, 2, 40, (33, 7), 33, dot_dtype)
    plain, zeros = attend(q, k, v, heads=4, lengths=lengths), torch.zeros_like(q)
    assert torch.equal(attend(q, k, v, heads=4, lengths=lengths, residual=zeros), plain)
    added = attend(q, k, v, heads=4, lengths=lengths, residual=zeros + 8)
    torch.testing.assert_close(added, plain + 8, rtol=2 * torch.finfo(dot_dtype).eps, atol=0)


X, COUNTS = torch.zeros(2, 4, 24), torch.tensor([4, 1], dtype=torch.int32)
REFUSED = {
    "of-another-batch": ({"lengths": COUNTS[:1]}, r"lengths: expected \(2,\), got \(1,\)"),
    "of-each-query": ({"lengths": COUNTS[:, None]}, r"lengths: expected \(2,\), got \(2, 1\)"),
    "in-int64": ({"lengths": COUNTS.long()}, "lengths: torch.int64 on cpu; expected int32 on cpu"),
    "elsewhere": ({"lengths": COUNTS.to("meta")}, "lengths: torch.int32 on meta; expected int32 on cpu"),
    "with-a-bias": ({"lengths": COUNTS, "bias": X[..., 0]}, "lengths: they cannot be combined with bias"),
    "no-whole-heads": ({"k": X[..., :3], "v": X[..., :3]}, "k: 3 channels; q has 6 heads of 4"),
    "groups-of-no-size": ({"k": X[..., :16], "v": X[..., :16]}, "k: 16 channels; q has 6 heads of 4"),
    "more-keys-than-queries": ({"q": X[..., :12], "heads": 3}, "k: 24 channels; q has 3 heads of 4"),
    "other-values": ({"v": X[..., :12]}, "v: .* does not fit q .* or k and v differ"),
    "no-keys": ({"k": X[..., :0], "v": X[..., :0]}, "k: .* does not fit q"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        attention(**{"q": X, "k": X, "v": X, "heads": 6} | options)
