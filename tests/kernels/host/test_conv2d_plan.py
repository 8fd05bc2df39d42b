"""Plans of convolutions: what they promise whatever the batch."""

from itertools import product

import pytest

from fastdiff.kernels.host.conv2d_plan import Problem, make_plan


@pytest.mark.parametrize("length", [4, 12, 16, 32, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_row_is_normalised_where_it_is_made_in_any_batch(length, itemsize):
    for pictures, channels, out_channels in product((1, 64, 1024), (14, 32, 256), (32, 64, 512)):
        sizes = (1, length, (channels,), out_channels, (1, 5), 1, (2, 2, 0, 0), False, itemsize, out_channels // 8)
        problem = Problem(pictures, *sizes)
        plan = make_plan(problem, obstacle=None, multiprocessors=132)
        assert plan.normalises(problem) and plan.tile.channels % problem.group == 0, plan
        assert plan.tile.pixels % plan.moments == 0 and plan.moments >= length, plan
