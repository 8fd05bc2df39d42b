"""Pictures in parallel on the CPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastdiff.execution import cpu_workers
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


def test_threads_that_come_later_keep_the_processs_setting():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        with cpu_workers._cpu_workers.__wrapped__() as workers, ThreadPoolExecutor(1) as other:
            assert workers.submit(torch.get_num_threads).result() == 4
            assert other.submit(torch.get_num_threads).result() == torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)
