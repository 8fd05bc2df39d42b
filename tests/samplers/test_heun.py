"""Heun over a tangent with a known integral. The second-order method is exact for a line."""

import torch

from fastdiff.samplers.heun import HeunConfig, heun_rows
from tests.samplers.tangents import SIGMAS, integral, pictures


def test_heun_integrates_a_line():
    sigmas = torch.cat([SIGMAS[:1], SIGMAS[1:-1].repeat_interleave(2), SIGMAS[-1:]])
    found = pictures(heun_rows(HeunConfig(), sigmas), sigmas, degree=1)
    assert len(found) == 2 * (len(SIGMAS) - 1) - 1
    for i, picture in enumerate(found[1::2], start=1):  # the second calls
        change = integral(SIGMAS[i].item(), 1) - integral(SIGMAS[0].item(), 1)
        torch.testing.assert_close(picture, torch.full_like(picture, change), rtol=1e-5, atol=1e-5)
