"""LMS over tangents with known integrals. Order k is exact for a polynomial of degree k - 1."""

import pytest
import torch

from fastdiff.samplers.lms import LMSConfig, lms_rows
from tests.samplers.tangents import PICTURE, SIGMAS, integral, pictures


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_lms_of_an_order_integrates_polynomials_below_it(order):
    found = pictures(lms_rows(LMSConfig(), SIGMAS, order), SIGMAS, order - 1)
    for i in range(order - 1, len(found)):  # earlier steps have fewer tangents
        change = integral(SIGMAS[i + 1].item(), order - 1) - integral(SIGMAS[i].item(), order - 1)
        before = found[i - 1] if i else torch.zeros(PICTURE, dtype=torch.float64)
        torch.testing.assert_close(found[i] - before, torch.full_like(before, change), rtol=1e-5, atol=1e-5)
