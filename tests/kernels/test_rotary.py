"""RMSNorm and rotary embedding of queries and keys, compared with float64."""

import pytest
import torch
import torch.nn.functional as F

from fastdiff.kernels.rotary import rotary
from tests.support.accuracy import peer_and_truth

SHAPES = {  # N, L, heads of queries, heads of keys, channels of a head
    "N2-L5-h4+4-d16": (2, 5, 4, 4, 16),
    "N1-L3-h30+30-d128-z-image": (1, 3, 30, 30, 128),
    "N2-L3-h32+8-d128-qwen3": (2, 3, 32, 8, 128),
    "N3-L7-h3+2-d6-odd": (3, 7, 3, 2, 6),
    "N1-L2-h1+1-d200-wide": (1, 2, 1, 1, 200),
    "N1-L2-h40+33-d4-many": (1, 2, 40, 33, 4),
    "N1-L1-h1+0-d2-smallest": (1, 1, 1, 0, 2),
    "N2-L4160-h30+30-d128-z-image": pytest.param((2, 4160, 30, 30, 128), marks=pytest.mark.gpu),
    "N1-L128-h32+8-d128-qwen3": pytest.param((1, 128, 32, 8, 128), marks=pytest.mark.gpu),
}
EPS = 1e-5


@pytest.fixture
def turn(runs_triton):
    """The operation; its kernel only, where Triton runs."""
    return rotary.kernel if runs_triton else rotary


@pytest.fixture(params=[False, True], ids=["pairs", "halves"])
def halves(request):
    return request.param


@pytest.fixture
def tables(randn):
    def make(n, tokens, width):
        angles = 3 * randn(n, tokens, width // 2)
        return angles.cos(), angles.sin()

    return make


def by_torch(x, cos, sin, query=None, key=None, *, queries, halves):
    """Return the operation computed by torch in the dtype of x, with complex numbers where they can be."""
    q, k = x.unflatten(-1, (-1, 2 * cos.shape[-1])).tensor_split((queries,), dim=2)
    if query is not None:
        q, k = (F.rms_norm(each, each.shape[-1:], norm, EPS) for each, norm in ((q, query), (k, key)))
    rows = torch.cat((q, k), dim=2)
    if halves:
        cos, sin = (torch.cat((each, each), dim=-1)[:, :, None] for each in (cos, sin))
        first, second = rows.chunk(2, dim=-1)
        return (rows * cos + torch.cat((-second, first), dim=-1) * sin).flatten(2)
    wide = rows.double() if rows.dtype == torch.float64 else rows.float()
    turns = torch.complex(cos.to(wide.dtype), sin.to(wide.dtype))[:, :, None]
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous()) * turns
    return torch.view_as_real(pairs).flatten(2).to(x.dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(turn, randn, tables, dtype, halves, assert_accurate, shape):
    n, tokens, queries, keys, width = shape
    x = randn(n, tokens, (queries + keys + 2) * width, dtype=dtype)[..., : (queries + keys) * width]  # and values
    norms, (cos, sin) = (1 + randn(width), 1 + randn(width)), tables(n, tokens, width)
    y = turn(x, cos, sin, norms, queries=queries, eps=EPS, halves=halves)
    assert y.is_contiguous() and y.dtype == dtype
    judged = peer_and_truth(by_torch, dtype, x, cos, sin, *norms, queries=queries, halves=halves)
    assert_accurate(y, *judged)


def test_without_a_norm(turn, randn, tables, dtype, halves, assert_accurate):
    x, (cos, sin) = randn(2, 5, 3 * 16, dtype=dtype), tables(2, 5, 16)
    y = turn(x, cos, sin, queries=2, eps=EPS, halves=halves)
    assert_accurate(y, *peer_and_truth(by_torch, dtype, x, cos, sin, queries=2, halves=halves))


def test_norms_of_two_dtypes(turn, randn, tables, halves):
    x, norms, (cos, sin) = randn(2, 5, 4 * 16), (randn(16, dtype=torch.bfloat16), randn(16)), tables(2, 5, 16)
    options = {"queries": 2, "eps": EPS, "halves": halves}
    wide = tuple(norm.float() for norm in norms)
    assert torch.equal(turn(x, cos, sin, norms, **options), turn(x, cos, sin, wide, **options))


def test_one_table_for_all_pictures(turn, randn, tables, halves):
    x, norms, (cos, sin) = randn(3, 5, 4 * 16), (randn(16), randn(16)), tables(1, 5, 16)
    options = {"queries": 2, "eps": EPS, "halves": halves}
    assert torch.equal(
        turn(x, cos, sin, norms, **options), turn(x, cos.expand(3, -1, -1), sin.repeat(3, 1, 1), norms, **options)
    )


def test_an_angle_of_zero_turns_nothing(turn, randn, halves):
    x, table = randn(2, 3, 4 * 8), randn(2, 3, 4)
    y = turn(x, torch.ones_like(table), torch.zeros_like(table), queries=4, eps=EPS, halves=halves)
    assert torch.equal(y, x)


def test_large_numbers(turn, randn, tables, dtype, halves, assert_accurate):
    """The squares of float16 would be infinite."""
    x, norms, (cos, sin) = 1000 * randn(1, 3, 4 * 16, dtype=dtype), (randn(16), randn(16)), tables(1, 3, 16)
    y = turn(x, cos, sin, norms, queries=2, eps=EPS, halves=halves)
    assert_accurate(y, *peer_and_truth(by_torch, dtype, x, cos, sin, *norms, queries=2, halves=halves))


def test_a_token_is_turned_alike_in_any_batch(turn, randn, tables, dtype, halves, runs_triton, device):
    if not runs_triton:
        pytest.skip("on the CPU a model runs one picture at a time")
    n = 64 if device.type == "cuda" else 5
    x, norms, (cos, sin) = randn(n, 6, 5 * 32, dtype=dtype), (randn(32), randn(32)), tables(n, 6, 32)
    options = {"queries": 3, "eps": EPS, "halves": halves}
    together = turn(x, cos, sin, norms, **options)
    for part in (slice(0, 1), slice(2, 5), slice(n - 1, n)):
        assert torch.equal(turn(x[part], cos[part], sin[part], norms, **options), together[part])
    tokens = turn(x[:, 2:5], cos[:, 2:5], sin[:, 2:5], norms, **options)
    assert torch.equal(tokens, together[:, 2:5])


X, TABLE, ROW = torch.zeros(2, 4, 24), torch.zeros(2, 4, 3), torch.zeros(6)
REFUSED = {
    "two-dimensions": ((X[0], TABLE, TABLE), {}, "x: expected floats"),
    "integers": ((X.int(), TABLE, TABLE), {}, "x: expected floats"),
    "half-table": ((X, TABLE.half(), TABLE), {}, "cos: torch.float16"),
    "sines-elsewhere": ((X, TABLE, TABLE.to("meta")), {}, "sin: torch.float32 on meta"),
    "three-tables": ((X, torch.zeros(3, 4, 3), TABLE), {}, "cos: expected"),
    "other-tokens": ((X, TABLE[:, :3], TABLE), {}, "cos: expected"),
    "other-sines": ((X, TABLE, TABLE[:1]), {}, "sin: .*but cos is"),
    "no-whole-heads": ((X[..., :20], TABLE, TABLE), {}, "queries: 2 of 20 channels in heads of 6"),
    "too-many-queries": ((X, TABLE, TABLE), {"queries": 5}, "queries: 5 of 24"),
    "norm-of-another-width": ((X, TABLE, TABLE, (ROW, ROW[:4])), {}, "keys' norm: expected"),
    "integer-norm": ((X, TABLE, TABLE, (ROW.int(), ROW)), {}, "queries' norm: torch.int32"),
}


@pytest.mark.parametrize(("arguments", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(arguments, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        rotary(*arguments, **{"queries": 2, "eps": EPS} | options)
