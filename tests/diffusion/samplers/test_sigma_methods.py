"""LMS and Heun over tangents whose integrals are known: order k is exact for a polynomial of degree k - 1."""

import pytest
import torch

from fastdiff.diffusion.configs import HeunConfig, LMSConfig
from fastdiff.diffusion.samplers.heun import heun_rows
from fastdiff.diffusion.samplers.lms import lms_rows
from fastdiff.kernels.denoise import EARLIER, StepOptions, denoise_step, keep

SIGMAS = torch.tensor([9.0, 5.0, 4.5, 2.0, 0.7, 0.5, 0.0])  # of uneven steps
COEFFICIENTS = (0.3, -1.2, 0.5, 0.25)
PICTURE = (1, 2, 2, 3)


def tangent(sigma, degree):
    return sum(c * sigma**k for k, c in enumerate(COEFFICIENTS[: degree + 1]))


def integral(sigma, degree):
    return sum(c * sigma ** (k + 1) / (k + 1) for k, c in enumerate(COEFFICIENTS[: degree + 1]))


def pictures(rows, sigmas, degree):
    """Pictures (1, 2, 2, 3) float64 after each call, of a model that says the tangent at the call's sigma."""
    x, found = torch.zeros(PICTURE, dtype=torch.float64), []
    earlier = (torch.zeros_like(x),) * EARLIER
    for row, sigma in zip(rows, sigmas[:-1].tolist(), strict=True):
        output = torch.full(PICTURE, tangent(sigma, degree), dtype=torch.float64)
        x, _, *kept = denoise_step(output, x, row, StepOptions(), earlier=earlier)
        earlier = keep(earlier, kept, True)
        found.append(x)
    return found


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_lms_of_an_order_integrates_polynomials_below_it(order):
    found = pictures(lms_rows(LMSConfig(), SIGMAS, order), SIGMAS, order - 1)
    for i in range(order - 1, len(found)):  # the steps before have fewer tangents
        change = integral(SIGMAS[i + 1].item(), order - 1) - integral(SIGMAS[i].item(), order - 1)
        before = found[i - 1] if i else torch.zeros(PICTURE, dtype=torch.float64)
        torch.testing.assert_close(found[i] - before, torch.full_like(before, change), rtol=1e-5, atol=1e-5)


def test_heun_integrates_a_line():
    sigmas = torch.cat([SIGMAS[:1], SIGMAS[1:-1].repeat_interleave(2), SIGMAS[-1:]])
    found = pictures(heun_rows(HeunConfig(), sigmas), sigmas, degree=1)
    assert len(found) == 2 * (len(SIGMAS) - 1) - 1
    for i, picture in enumerate(found[1::2], start=1):  # the second calls
        change = integral(SIGMAS[i].item(), 1) - integral(SIGMAS[0].item(), 1)
        torch.testing.assert_close(picture, torch.full_like(picture, change), rtol=1e-5, atol=1e-5)
