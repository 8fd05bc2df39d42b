"""A fingerprint changes with any value, order or sign of the tensors, whatever torch counts."""

import itertools

import pytest
import torch

from fastdiff.acceleration import contents
from fastdiff.acceleration.contents import fingerprint

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 5), (7,), (2, 3, 4, 4), ()
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


CHANGES = {
    "one element": lambda each: each.data.flatten()[-1:].copy_(each.data.flatten()[-1:].float() + 1),
    "last bit": lambda each: each.data.view(torch.uint8).flatten()[:1].bitwise_xor_(1),
    "signs": lambda each: each.data.copy_(-each.data.float()),
    "order": lambda each: each.data.copy_(each.data.float().flatten().flip(0).view(each.shape)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(dtype, change):
    for i in range(3):
        given = tensors(dtype)
        before = fingerprint(given)
        assert fingerprint(tensors(dtype)) == before
        CHANGES[change](given[i])
        assert fingerprint(given) != before, i


def test_all_signs_that_change_are_seen():
    """The highest bits of all elements change. In some cases half of them become 1, and half 0."""
    for signs in itertools.product((1.0, -1.0), repeat=6):
        tensor = torch.tensor(signs)
        assert fingerprint([tensor]) != fingerprint([-tensor]), signs


def test_exchanged_tensors_are_seen():
    one, two = torch.ones(8), torch.full((8,), 2.0)
    assert fingerprint([one, two]) != fingerprint([two, one])


def test_chunks(monkeypatch):
    monkeypatch.setattr(contents, "CHUNK", 16)
    given = tensors()
    before = fingerprint(given)
    assert len(before) == 4  # no two tensors fit into 16 numbers
    for each in given:
        values = each.data.clone()
        each.data.add_(1)
        assert fingerprint(given) != before
        each.data.copy_(values)
    assert fingerprint(given) == before


def test_memory_formats_and_parameters():
    filters = torch.nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    before = fingerprint([filters, filters[:, 1:]])
    filters.data[0, 2, 1, 1] += 1
    assert fingerprint([filters, filters[:, 1:]]) != before
    assert fingerprint([]) == []
