"""`assert_accurate` fails a wrong output, even if torch's output is just as wrong."""

import pytest
import torch

from tests.support.accuracy import CAPS, assert_accurate, peer_and_truth

dtypes = pytest.mark.parametrize("dtype", CAPS, ids=str)


def rounded(dtype):
    """Return numbers in float64, and the same numbers rounded to the dtype."""
    truth = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return truth, truth.to(dtype)


@dtypes
def test_what_is_rounded_once_passes(dtype):
    truth, y = rounded(dtype)
    assert_accurate(y, y, truth)
    assert_accurate(truth.to(dtype), y.clone(), truth)
    assert_accurate(torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype), torch.zeros(3).double())


@dtypes
@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: y + 100,
        lambda y: y * 1.05,
        torch.zeros_like,
        lambda y: y.flip(0),
        lambda y: y.index_fill(0, torch.tensor([2]), torch.nan),
        lambda y: y.index_fill(1, torch.tensor([7]), torch.inf),
        lambda y: torch.full_like(y, torch.nan),
    ],
    ids=["off-by-100", "scale", "zeros", "rows-swapped", "a-row-of-nan", "a-column-of-infinity", "nan"],
)
def test_what_is_wrong_fails_beside_a_right_peer_and_beside_itself(dtype, wrong):
    truth, y = rounded(dtype)
    for peer in (y, wrong(y)):
        with pytest.raises(AssertionError, match=r"beyond|RMS"):
            assert_accurate(wrong(y), peer, truth)


@dtypes
def test_errors_are_held_to_the_peer_below_the_cap_too(dtype):
    truth, y = rounded(dtype)
    off = y + truth.abs().max() * CAPS[dtype] / 2
    assert_accurate(off.to(dtype), off.to(dtype), truth)
    with pytest.raises(AssertionError, match="torch's own"):
        assert_accurate(off.to(dtype), y, truth)


def test_a_small_error_everywhere_is_seen_by_its_rms():
    truth, y = rounded(torch.float32)
    peer = y.clone()
    peer[0, 0] += 4e-6
    with pytest.raises(AssertionError, match="RMS"):
        assert_accurate(y + 4e-6, peer, truth)


def test_what_large_numbers_lose_is_allowed_where_it_is_said():
    truth, y = rounded(torch.float32)
    off = y + 1e-4
    assert_accurate(off, off, truth, lost=1e-4)
    with pytest.raises(AssertionError, match="cap"):
        assert_accurate(off, off, truth, lost=1e-5)


def test_other_shapes_dtypes_and_a_truth_that_is_none_fail():
    truth, y = rounded(torch.float32)
    for actual, peer, exact in ((y[:1], y, truth), (y, y.half(), truth), (y, y, truth.float()), (y, y[:1], truth)):
        with pytest.raises(AssertionError):
            assert_accurate(actual, peer, exact)


def test_an_operation_runs_in_its_dtype_and_in_float64():
    def total(x, others, *, bias=None):
        return x + others[0] + (0 if bias is None else bias)

    x = torch.ones(2, dtype=torch.float16)
    peer, truth = peer_and_truth(total, x.dtype, x, (x.float(), None), bias=torch.ones(2))
    assert (peer.dtype, truth.dtype) == (torch.float16, torch.float64) and (truth == 3).all()
