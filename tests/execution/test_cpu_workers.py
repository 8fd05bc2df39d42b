"""Pictures side by side on the CPU."""

import pytest
import torch

from fastdiff.execution.cpu_workers import map_pictures


def test_each_picture_is_alone_and_in_its_place():
    shapes = []

    def add(x, y):
        shapes.append((x.shape, y.shape))
        return x + y

    x, y = torch.randn(9, 2, 2), torch.randn(9)
    outputs = torch.cat(tuple(map_pictures(add, x, y)))
    assert torch.equal(outputs, x + y[:, None, None])
    assert set(shapes) == {((1, 2, 2), (1,))}


def test_an_error_of_a_picture_is_raised():
    def fail(x):
        raise ArithmeticError("picture")

    with pytest.raises(ArithmeticError, match="picture"):
        list(map_pictures(fail, torch.zeros(3, 1)))
